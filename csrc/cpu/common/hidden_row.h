// One row of the joiner's hidden layer: act(am + lm).
#pragma once

#include "cpu/common/vectorise.h"
#include "joiner_options.h"

namespace pruned_rnnt {

template <Activation activation, typename real>
PRUNED_RNNT_INLINE real activate(real x) {
  if (activation == Activation::kTanh) return tanh_of(x);
  // Written so that NaN stays NaN.
  if (activation == Activation::kRelu) return x < 0 ? real(0) : x;
  return x;
}

template <Activation activation>
struct HiddenRow {
  template <typename scalar>
  static PRUNED_RNNT_INLINE void run(const scalar* am, const scalar* lm, int64_t D,
                                     scalar* hidden) {
    using real = acc_type<scalar>;
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const real sum = static_cast<real>(am[d]) + static_cast<real>(lm[d]);
      hidden[d] = static_cast<scalar>(activate<activation>(sum));
    }
  }
};

}  // namespace pruned_rnnt
