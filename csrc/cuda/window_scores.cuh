// Scores of the windows of a frame, of which prune_bounds chooses:
// score(s) = sum_{u=s}^{s+S-1} gy(u) - gx(s-1) (pruned_rnnt/ops/prune_bounds.py).
//
// Axes: U symbols, S columns of the band.
#pragma once

#include "cuda/arithmetic.cuh"

namespace pruned_rnnt {
namespace cuda {

// Scores this close to the largest count as equal, so that rounding does not choose the window.
constexpr float kTie = 1e-5f;

// Columns by which a path can move from one frame to the next inside a band of S columns.
inline int32_t largest_step(int64_t S, int64_t rnnt_type) {
  return static_cast<int32_t>(rnnt_type == 0 ? S - 1 : 1);
}

// gx, gy of one frame with `width` columns.
template <typename real>
struct FrameOccupancy {
  const real *gx, *gy;
  int32_t width, S;

  __device__ __forceinline__ real score(int32_t s) const {
    real kept = 0;
    const int32_t end = min(s + S, width);
    for (int32_t u = s; u < end; ++u) kept += gy[u];
    return s > 0 ? kept - gx[s - 1] : kept;
  }
};

}  // namespace cuda
}  // namespace pruned_rnnt
