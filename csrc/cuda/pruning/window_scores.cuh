// Scores of the windows of a frame, of which prune_bounds chooses
// (pruned_rnnt/ops/pruning/prune_bounds.py):
//   score(s) = sum_{u=s}^{s+S-1} gy(u) - gx(s-1)     regular, constrained
//   score(s) = sum_{u=s}^{s+S-1} gy(u) + gx(u)       modified, rna: one_arc_a_frame
//
// Axes: U symbols, S columns of the band.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/lattice/topology.cuh"

namespace pruned_rnnt {
namespace cuda {

// Scores this close to the largest count as equal, so that rounding does not choose the window.
constexpr float kTie = 1e-5f;

// Columns by which a path can move from one frame to the next inside a band of S columns.
inline int32_t largest_step(int64_t S, int64_t rnnt_type) {
  return static_cast<int32_t>(rnnt_type == 0 ? S - 1 : 1);
}

// Whether a symbol takes the place of a frame's blank, so that both count in the score.
inline bool one_arc_a_frame(int64_t rnnt_type) {
  const Topology topology = static_cast<Topology>(rnnt_type);
  return topology == Topology::kModified || topology == Topology::kRna;
}

// gx, gy of one frame with `width` columns.
template <typename real>
struct FrameOccupancy {
  const real *gx, *gy;
  int32_t width, S;
  bool one_arc_a_frame;

  __device__ __forceinline__ real mass(int32_t u) const {
    return one_arc_a_frame ? gy[u] + gx[u] : gy[u];
  }

  // What enters window s from below.
  __device__ __forceinline__ real entering(int32_t s) const {
    return s > 0 && !one_arc_a_frame ? gx[s - 1] : real(0);
  }

  __device__ __forceinline__ real score(int32_t s) const {
    real kept = 0;
    const int32_t end = min(s + S, width);
    for (int32_t u = s; u < end; ++u) kept += mass(u);
    return kept - entering(s);
  }
};

}  // namespace cuda
}  // namespace pruned_rnnt
