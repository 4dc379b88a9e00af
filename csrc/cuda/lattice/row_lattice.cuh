// Shared parts of the recursions over lattices stored as rows.
//
// Axes: N utterances, T frames, S columns of a frame, R rows.
#pragma once

#include "cuda/common/ops.cuh"
#include "cuda/lattice/halves.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {

// The frames of an utterance that a block writes; rest: and all rows behind them.
struct RowRange {
  int32_t begin, end;
  bool rest;

  RNNT_DEVICE static RowRange all(int32_t frames) { return {0, max(frames, 0), true}; }
  RNNT_DEVICE static RowRange half(int32_t frames, bool early) {
    const int32_t cut = cut_of(max(frames, 0));
    return early ? RowRange{0, cut, false} : RowRange{cut, max(frames, 0), true};
  }
};

// Clears the rows of gx and gy that the walks do not write: those behind the frames, the columns of
// a frame that are not symbol positions 0 .. symbols, and all if there is no path. `rows`: of all
// utterances; start: of this one's band, or null. By all threads of the block.
template <typename real>
__device__ void clear_rows(const RowGeometry& geometry, const LatticeArrays<real>& arrays,
                           int32_t n, bool no_path, const RowRange& range, int64_t rows,
                           int32_t symbols, const int32_t* start) {
  const int64_t first = geometry.first_row_of(n), width = geometry.width_of(n);
  int64_t count = geometry.utterance_rows;
  if (geometry.row_splits != nullptr) count = min(rows, geometry.row_splits[n + 1]) - first;
  const int64_t end = range.rest ? count : range.end * width;
  for (int64_t i = (no_path ? range.begin : range.end) * width + threadIdx.x; i < end;
       i += blockDim.x) {
    arrays.gx[first + i] = arrays.gy[first + i] = 0;
  }
  if (no_path) return;
  for (int64_t t = range.begin + threadIdx.x / 32; t < range.end; t += blockDim.x / 32) {
    const int32_t begin = start != nullptr ? 0 : symbols + 1;
    for (int64_t j = begin + threadIdx.x % 32; j < width; j += 32) {
      if (start != nullptr && start[t] + j >= 0 && start[t] + j <= symbols) continue;
      arrays.gx[first + t * width + j] = arrays.gy[first + t * width + j] = 0;
    }
  }
}

// Whole lattices and wide bands (row_lattice.cu).
template <typename real>
void row_lattice(const Launcher& launch, const RowGeometry& geometry, int64_t rows,
                 int64_t rnnt_type, real delay_penalty, const LatticeArrays<real>& arrays);

}  // namespace pruned_rnnt::cuda
