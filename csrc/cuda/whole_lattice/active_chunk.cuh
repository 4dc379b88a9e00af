// Chunks of the active rows of the exact loss.
// Contracts: pruned_rnnt/ops/joiner/active_rows.py. A chunk is places begins[k] .. begins[k+1] - 1:
//
//   row of the lattice      0  1  2  3  4  5  6  7  8  9        a frame has 5 rows
//   active                  .  x  x  .  .  .  .  x  x  x
//   places (rows before)    0  0  1  2  2  2  2  2  3  4  5
//   listed                  1  2  7  8  9                       place 2 is row 7
//
// The number of active rows is known to the device only: grids cover the largest chunk, and warps
// behind its end have nothing to do. bfloat16, in vectors of 16 bytes.
//
// Axes: N batch, T frames, U symbols, W columns of a frame, D joiner dim, V vocabulary, R rows.
#pragma once
#include "cuda/common/vector_access.cuh"
#include "cuda/whole_lattice/active_ops.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda::active {

using scalar = BFloat16;
using real = acc_type<scalar>;
constexpr int kWidth = 16 / sizeof(scalar);
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Enough to fill a large device.
constexpr int64_t kMostBlocks = 1056;

// Chunk k of the active rows.
struct ActiveChunk {
  ActiveChunk(const ActiveLists& lists, int64_t k)
      : listed(data_of<int32_t>(lists.listed)),
        places(data_of<int32_t>(lists.places)),
        begins(data_of<int32_t>(lists.begins) + k),
        utterances(data_of<int32_t>(lists.utterances) + k),
        frames(data_of<int32_t>(lists.frames) + k) {}

  RNNT_DEVICE int32_t begin() const { return begins[0]; }
  RNNT_DEVICE int32_t end() const { return begins[1]; }

  // listed: null if every row is active.
  const int32_t* __restrict__ listed, * __restrict__ places;
  // Of the first row of this chunk, and of the next one.
  const int32_t *begins, *utterances, *frames;
};

// Rows, `pitch` elements apart, of 16-byte vectors of bfloat16.
inline void check_rows(const View& rows, int64_t pitch, const char* op) {
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::BFloat16 &&
                      widest_vector<scalar>(rows.data_ptr(), pitch) == kWidth,
                  op, " takes bfloat16 rows that begin at multiples of 16 bytes");
}

}  // namespace pruned_rnnt::cuda::active
