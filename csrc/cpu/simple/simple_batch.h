// Sizes of the trivial joiner's ops. Formulas: pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary.
#pragma once

#include "cpu/common/symbol_table.h"
#include "joiner_options.h"

namespace pruned_rnnt {

struct Batch {
  Batch(const Tensor& product, const Tensor& logit_lengths, const Tensor& target_lengths)
      : N(product.size(0)),
        T(product.size(1)),
        width(product.size(2)),
        logit_lengths(data_of<int32_t>(logit_lengths)),
        target_lengths(data_of<int32_t>(target_lengths)) {}

  // Frames and symbol positions that have nodes: none if the lengths exceed the padding.
  int64_t frames(int64_t n) const { return fits(n) ? logit_lengths[n] : 0; }
  int64_t positions(int64_t n) const { return fits(n) ? target_lengths[n] + 1 : 0; }
  bool fits(int64_t n) const {
    return logit_lengths[n] <= T && target_lengths[n] >= 0 && target_lengths[n] < width;
  }

  int64_t N, T, width;  // width is U + 1
  const int32_t *logit_lengths, *target_lengths;
};

}  // namespace pruned_rnnt
