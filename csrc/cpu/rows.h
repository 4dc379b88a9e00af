// Loops over one row of logits, and how many rows make a task.
#pragma once

#include <algorithm>

#include "cpu/vectorise.h"
#include "stable.h"

namespace pruned_rnnt {

// Rows of `size` elements that take some ten microseconds together.
inline int64_t rows_per_task(int64_t size) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(size, 1));
}

// The largest element; NaN is passed over (it shows in the sum that follows).
template <typename real, typename scalar>
PRUNED_RNNT_INLINE real row_maximum(const scalar* x, int64_t size) {
  real largest = minus_infinity<real>;
#pragma omp simd reduction(max : largest)
  for (int64_t v = 0; v < size; ++v) {
    const real value = static_cast<real>(x[v]);
    largest = value > largest ? value : largest;
  }
  return largest;
}

// A maximum that can be subtracted: 0 for a row of nothing but -inf.
template <typename real>
PRUNED_RNNT_INLINE real finite_or_zero(real maximum) {
  return maximum == minus_infinity<real> ? real(0) : maximum;
}

template <typename real, typename scalar>
PRUNED_RNNT_INLINE real sum_of_exp(const scalar* x, int64_t size, real shift) {
  real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t v = 0; v < size; ++v) sum += exp_of_nonpositive(static_cast<real>(x[v]) - shift);
  return sum;
}

}  // namespace pruned_rnnt
