// Sums of the arcs that leave a node of a TDT lattice, with the share of each: by trees instead of
// chains, because a walk over a lattice waits for them at every step.
#pragma once

#include "cuda/lattice/probability.cuh"

namespace pruned_rnnt::cuda {

// The result of combining all numbers, pairs at a time; `numbers` is overwritten.
template <int count, typename number, typename Combine>
RNNT_DEVICE number combined(number (&numbers)[count], Combine&& combine) {
#pragma unroll
  for (int distance = 1; distance < count; distance *= 2) {
#pragma unroll
    for (int i = 0; i + distance < count; i += 2 * distance) {
      numbers[i] = combine(numbers[i], numbers[i + distance]);
    }
  }
  return numbers[0];
}

// The sum of the terms, not normalised, and the share of each in it; 0 if the sum is 0.
template <int count>
RNNT_DEVICE ScaledProbability sum_with_shares(const ScaledProbability (&terms)[count],
                                              float (&shares)[count]) {
  int32_t exponents[count];
#pragma unroll
  for (int i = 0; i < count; ++i) exponents[i] = terms[i].exponent;
  const int32_t largest = combined(exponents, [](int32_t a, int32_t b) { return max(a, b); });
  float parts[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    parts[i] = shares[i] =
        terms[i].factor * ScaledProbability::power_of_2(terms[i].exponent - largest);
  }
  const float sum = combined(parts, [](float a, float b) { return a + b; });
  const float inverse = sum == 0.0f ? 0.0f : divide(1.0f, sum);
#pragma unroll
  for (int i = 0; i < count; ++i) shares[i] *= inverse;
  return {sum, largest};
}

template <int count>
RNNT_DEVICE LogProbability sum_with_shares(const LogProbability (&terms)[count],
                                           double (&shares)[count]) {
  double largest = kLogZero<double>;
#pragma unroll
  for (int i = 0; i < count; ++i) largest = fmax(largest, terms[i].value);
  double sum = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    shares[i] = ::exp(terms[i].value - largest);
    sum += shares[i];
  }
  // Where every term is log 0, the exponentials mean nothing; NaN stays NaN.
  const double factor = largest < kLogZero<double> / 2 ? 0.0 : 1.0 / sum;
#pragma unroll
  for (int i = 0; i < count; ++i) shares[i] *= factor;
  return {largest + ::log(sum)};
}

}  // namespace pruned_rnnt::cuda
