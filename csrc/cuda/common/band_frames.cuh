// Iterates over the frames that keep a column of the lattice, in order, so that sums are the same
// from run to run.
//
// Axes: T frames, S columns of the band, U symbols.
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace pruned_rnnt::cuda {

// Calls work(t) for all t in begin..end-1 with start[t] <= u < start[t] + S, in order, by a warp.
template <typename Work>
RNNT_DEVICE void for_frames_with(const int32_t* start, int32_t S, int32_t u, int32_t begin,
                                 int32_t end, Work&& work) {
  const int lane = threadIdx.x % 32;
  for (int32_t first = begin; first < end; first += 32) {
    bool kept = false;
    if (first + lane < end) {
      const int32_t column = u - start[first + lane];
      kept = column >= 0 && column < S;
    }
    for (unsigned left = __ballot_sync(kAllLanes, kept); left != 0; left &= left - 1) {
      work(first + __ffs(left) - 1);
    }
  }
}

}  // namespace pruned_rnnt::cuda
