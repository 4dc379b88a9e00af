// Loops over one row of logits, and the number of rows of a task.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/common/parallel.h"
#include "cpu/common/vectorise.h"
#include "row_geometry.h"

namespace pruned_rnnt {

// As many rows of `size` elements as take some ten microseconds.
inline int64_t rows_per_task(int64_t size) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(size, 1));
}

// Calls work(r, node) for all rows r of a chunk, which begins at row `row_begin` of the geometry,
// from several threads; size: elements that a row takes.
template <typename Work>
void for_rows(const RowGeometry& geometry, int64_t row_begin, int64_t rows, int64_t size,
              const Work& work) {
  parallel_tasks(rows, rows_per_task(size), [&](int64_t begin, int64_t end) {
    RowCursor node(geometry, row_begin + begin);
    for (int64_t r = begin;;) {
      work(r, node);
      if (++r == end) return;
      node.advance(1);
    }
  });
}

// An integer that orders as the number does, and back: some compilers vectorise the maximum of
// integers but not that of numbers that may be NaN. NaN is largest or smallest, by its sign.
template <typename real>
PRUNED_RNNT_INLINE auto ordered_key(real value) {
  using integer = typename RealTraits<real>::integer;
  const integer bits = bits_as<integer>(value);
  return bits ^ ((bits >> (8 * sizeof(integer) - 1)) & std::numeric_limits<integer>::max());
}

template <typename real, typename integer>
PRUNED_RNNT_INLINE real number_of_key(integer key) {
  return bits_as<real>(key ^
                       ((key >> (8 * sizeof(integer) - 1)) & std::numeric_limits<integer>::max()));
}

// Maximum of value(0) .. value(size - 1), -inf if size is 0. Whether a NaN counts as the largest or
// is skipped does not matter: the sum that follows is NaN.
template <typename real, typename Value>
PRUNED_RNNT_INLINE real largest_of(int64_t size, const Value& value) {
  auto largest = ordered_key(minus_infinity<real>);
#pragma omp simd reduction(max : largest)
  for (int64_t v = 0; v < size; ++v) {
    const auto key = ordered_key(static_cast<real>(value(v)));
    largest = key > largest ? key : largest;
  }
  return number_of_key<real>(largest);
}

template <typename real, typename scalar>
PRUNED_RNNT_INLINE real row_maximum(const scalar* x, int64_t size) {
  return largest_of<real>(size, [x](int64_t v) { return x[v]; });
}

// A maximum that can be subtracted: 0 if all elements are -inf.
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
