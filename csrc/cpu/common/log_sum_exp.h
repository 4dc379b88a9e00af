// Normalisers of one row of logits.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/common/rows.h"

namespace pruned_rnnt {

// The log-sum-exp of a row in two parts: the differences to `shift`, the maximum of the row, are
// exact for the most probable symbols.
template <typename real>
struct Normaliser {
  real shift, log_sum;
};

template <typename real>
PRUNED_RNNT_INLINE real total(Normaliser<real> normaliser) {
  return normaliser.shift + normaliser.log_sum;
}

struct LogSumExp {
  template <typename scalar>
  static PRUNED_RNNT_INLINE Normaliser<acc_type<scalar>> run(const scalar* x, int64_t size) {
    using real = acc_type<scalar>;
    const real shift = finite_or_zero(row_maximum<real>(x, size));
    return {shift, std::log(sum_of_exp<real>(x, size, shift))};
  }
};

// That of a row without its blank.
struct LogSumExpNonBlank {
  template <typename scalar>
  static PRUNED_RNNT_INLINE Normaliser<acc_type<scalar>> run(const scalar* x, int64_t size,
                                                             int64_t blank) {
    using real = acc_type<scalar>;
    const scalar* above = x + blank + 1;
    const int64_t size_above = size - blank - 1;
    const real shift =
        finite_or_zero(std::max(row_maximum<real>(x, blank), row_maximum<real>(above, size_above)));
    return {shift, std::log(sum_of_exp<real>(x, blank, shift) +
                            sum_of_exp<real>(above, size_above, shift))};
  }
};

template <typename real>
inline real log_sigmoid(real x) {
  return std::min(x, real(0)) - std::log1p(std::exp(-std::fabs(x)));
}

}  // namespace pruned_rnnt
