// Sizes and launch grid of the trivial joiner's ops. Formulas:
// pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary.
#pragma once

#include "cuda/common/launch.cuh"
#include "joiner_options.h"

namespace pruned_rnnt::cuda {

struct SimpleBatch {
  // nodes: any tensor (N,T,U+1); product (N,T,U') has rows at least as long.
  SimpleBatch(const View& nodes, const View& product, const View& logit_lengths,
              const View& target_lengths)
      : logit_lengths(data_of<int32_t>(logit_lengths)),
        target_lengths(data_of<int32_t>(target_lengths)),
        N(int32_t(nodes.size(0))),
        T(int32_t(nodes.size(1))),
        width(int32_t(nodes.size(2))),
        product_width(int32_t(product.size(2))) {}

  // Frames and columns that have rows.
  RNNT_DEVICE int32_t frames(int32_t n) const { return min(logit_lengths[n], T); }
  RNNT_DEVICE int32_t columns(int32_t n) const { return min(target_lengths[n] + 1, width); }
  RNNT_DEVICE bool fits(int32_t n) const {
    return logit_lengths[n] <= T && target_lengths[n] < width;
  }

  const int32_t *logit_lengths, *target_lengths;
  int32_t N, T, width, product_width;  // width is U + 1
};

// Distribution of nodes: threads along the columns of a frame, each for kFramesEach frames, so that
// the data of a column is read once.
constexpr int kNodeThreads = 256;
constexpr int kFramesEach = 8;

struct NodeGrid {
  NodeGrid(const SimpleBatch& batch, int32_t columns) {
    const uint32_t along = std::min<uint32_t>(128, (columns + 31) / 32 * 32);
    block = dim3(along, kNodeThreads / along);
    const uint32_t frames = block.y * kFramesEach;
    grid = dim3((batch.T + frames - 1) / frames, (columns + along - 1) / along, batch.N);
  }
  dim3 grid, block;
};

}  // namespace pruned_rnnt::cuda
