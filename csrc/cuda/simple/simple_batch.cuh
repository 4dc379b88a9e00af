// What the ops of the trivial joiner share. Formulas: pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

// Products from here on have lost nothing that could be seen to underflow.
template <typename real>
constexpr real kSafeProduct = std::is_same_v<real, double> ? real(1e-280) : real(1e-28);

struct SimpleBatch {
  // nodes: any tensor (N,T,U+1); product (N,T,U') has rows at least as long.
  SimpleBatch(const View& nodes, const View& product, const View& logit_lengths,
              const View& target_lengths)
      : logit_lengths(data_of<int32_t>(logit_lengths)),
        target_lengths(data_of<int32_t>(target_lengths)),
        N(static_cast<int32_t>(nodes.size(0))),
        T(static_cast<int32_t>(nodes.size(1))),
        width(static_cast<int32_t>(nodes.size(2))),
        product_width(static_cast<int32_t>(product.size(2))) {}

  // Frames and columns that have rows.
  __device__ __forceinline__ int32_t frames(int32_t n) const { return min(logit_lengths[n], T); }
  __device__ __forceinline__ int32_t columns(int32_t n) const {
    return min(target_lengths[n] + 1, width);
  }
  __device__ __forceinline__ bool fits(int32_t n) const {
    return logit_lengths[n] <= T && target_lengths[n] < width;
  }

  const int32_t *logit_lengths, *target_lengths;
  int32_t N, T, width, product_width;  // width is U + 1
};

template <typename real>
struct SimpleScales {
  SimpleScales(double lm_only_scale, double am_only_scale)
      : combined(static_cast<real>(1 - lm_only_scale - am_only_scale)),
        lm_only(static_cast<real>(lm_only_scale)),
        am_only(static_cast<real>(am_only_scale)) {}

  real combined, lm_only, am_only;
};

// How nodes are shared out: threads along the columns of a frame, and kFramesEach frames one after
// the other, so that what belongs to a column is read once.
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

}  // namespace cuda
}  // namespace pruned_rnnt
