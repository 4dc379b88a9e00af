// Scores of the windows of a frame, from which prune_bounds chooses
// (pruned_rnnt/ops/pruning/prune_bounds.py):
//
//   score(s) = sum_{u=s}^{s+S-1} blank(u) - emit(s-1)     regular, constrained
//   score(s) = sum_{u=s}^{s+S-1} blank(u) + emit(u)       modified, rna: one_arc_a_frame
//
// Axes: U symbols, S columns of the band.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "topology.h"

namespace pruned_rnnt::cuda {

// Scores this close to the largest count as equal, so that rounding does not choose the window.
constexpr float kTie = 1e-5f;

// Occupancies of one frame with `width` columns.
template <typename real>
struct FrameOccupancy {
  const real *emit, *blank;
  int32_t width, S;
  bool one_arc_a_frame;

  RNNT_DEVICE real mass(int32_t u) const { return one_arc_a_frame ? blank[u] + emit[u] : blank[u]; }

  // Mass that enters window s from below.
  RNNT_DEVICE real entering(int32_t s) const {
    return s > 0 && !one_arc_a_frame ? emit[s - 1] : real(0);
  }

  RNNT_DEVICE real score(int32_t s) const {
    real kept = 0;
    const int32_t end = min(s + S, width);
    for (int32_t u = s; u < end; ++u) kept += mass(u);
    return kept - entering(s);
  }
};

}  // namespace pruned_rnnt::cuda
