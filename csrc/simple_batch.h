// Sizes of the trivial joiner's ops. Formulas: pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols.
#pragma once

#include "host_device.h"
#include "stable.h"

namespace pruned_rnnt {

struct SimpleBatch {
  // nodes: any tensor (N,T,U+1); product (N,T,U') has rows at least as long.
  template <typename Array>
  SimpleBatch(const Array& nodes, const Array& product, const Array& logit_lengths,
              const Array& target_lengths)
      : logit_lengths(data_of<int32_t>(logit_lengths)),
        target_lengths(data_of<int32_t>(target_lengths)),
        N(int32_t(nodes.size(0))),
        T(int32_t(nodes.size(1))),
        width(int32_t(nodes.size(2))),
        product_width(int32_t(product.size(2))) {}

  // Frames and columns that have nodes: none if the lengths exceed the padding.
  PRUNED_RNNT_HOST_DEVICE int32_t frames(int64_t n) const { return fits(n) ? logit_lengths[n] : 0; }
  PRUNED_RNNT_HOST_DEVICE int32_t columns(int64_t n) const {
    return fits(n) ? target_lengths[n] + 1 : 0;
  }
  PRUNED_RNNT_HOST_DEVICE bool fits(int64_t n) const {
    return logit_lengths[n] <= T && target_lengths[n] >= 0 && target_lengths[n] < width;
  }

  const int32_t *logit_lengths, *target_lengths;
  int32_t N, T, width, product_width;  // width is U + 1
};

}  // namespace pruned_rnnt
