// Sums of the arcs that leave a node of a TDT lattice, and the share of each: by trees instead of
// chains, because a walk over a lattice waits for the sums at every step.
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

// The factors of the terms at their largest exponent, which is returned.
template <int count>
RNNT_DEVICE int32_t align(const ScaledProbability (&terms)[count], float (&factors)[count]) {
  int32_t exponents[count];
#pragma unroll
  for (int i = 0; i < count; ++i) exponents[i] = terms[i].exponent;
  const int32_t largest = combined(exponents, [](int32_t a, int32_t b) { return max(a, b); });
#pragma unroll
  for (int i = 0; i < count; ++i) {
    factors[i] = terms[i].factor * ScaledProbability::power_of_2(terms[i].exponent - largest);
  }
  return largest;
}

// The sum of the terms, not normalised; `factors` is overwritten.
template <int count>
RNNT_DEVICE float sum_of(float (&factors)[count]) {
  return combined(factors, [](float a, float b) { return a + b; });
}
template <int count>
RNNT_DEVICE ScaledProbability sum_of(const ScaledProbability (&terms)[count]) {
  float factors[count];
  const int32_t exponent = align(terms, factors);
  return {sum_of(factors), exponent};
}

// The share of each term in the sum; 0 if the sum is 0.
template <int count>
RNNT_DEVICE void shares_of(const ScaledProbability (&terms)[count], float (&shares)[count]) {
  float factors[count];
  align(terms, factors);
#pragma unroll
  for (int i = 0; i < count; ++i) shares[i] = factors[i];
  const float sum = sum_of(factors);
  const float inverse = sum == 0.0f ? 0.0f : divide(1.0f, sum);
#pragma unroll
  for (int i = 0; i < count; ++i) shares[i] *= inverse;
}

template <int count>
RNNT_DEVICE double largest_of(const LogProbability (&terms)[count]) {
  double largest = kLogZero<double>;
#pragma unroll
  for (int i = 0; i < count; ++i) largest = fmax(largest, terms[i].value);
  return largest;
}

template <int count>
RNNT_DEVICE LogProbability sum_of(const LogProbability (&terms)[count]) {
  const double largest = largest_of(terms);
  double sum = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) sum += ::exp(terms[i].value - largest);
  return {largest + ::log(sum)};
}

template <int count>
RNNT_DEVICE void shares_of(const LogProbability (&terms)[count], double (&shares)[count]) {
  const double largest = largest_of(terms);
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
}

}  // namespace pruned_rnnt::cuda
