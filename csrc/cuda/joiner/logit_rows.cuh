// Distribution of rows of logits over threads: a group of lanes takes a row, the groups of a block
// take adjacent rows, rows_each times, so that only the first row must search its node:
//
//   block 0   rows 0 .. groups-1, then groups .. 2 groups-1, ..      (rows_each times)
//   block 1   the rows behind those
//
// Axes: R rows, V vocabulary.
#pragma once

#include "cuda/common/vector_access.cuh"
#include "joiner_options.h"

namespace pruned_rnnt::cuda {

constexpr int kRowThreads = 256;
// Lanes of a group that takes a row of at most 64 vectors.
constexpr int kSmallGroup = 8;

// Rows begin .. begin + count of the geometry, rows_each for every group.
struct RowRange {
  template <int lanes>
  static RowRange of(int64_t begin, int64_t count) {
    RowRange range{begin, count, 1};
    // Groups take several rows as long as enough blocks are left.
    constexpr int64_t enough_blocks = 4096;
    while (range.rows_each < 8 && range.blocks<lanes>() > enough_blocks) range.rows_each *= 2;
    return range;
  }

  template <int lanes>
  __host__ __device__ static constexpr int32_t groups_abreast() {
    return kRowThreads / lanes;
  }
  template <int lanes>
  uint32_t blocks() const {
    const int64_t rows_a_block = int64_t(groups_abreast<lanes>()) * rows_each;
    return uint32_t((count + rows_a_block - 1) / rows_a_block);
  }
  template <int lanes>
  RNNT_DEVICE int64_t first_row() const {
    return int64_t(blockIdx.x) * groups_abreast<lanes>() * rows_each + threadIdx.x / lanes;
  }

  int64_t begin, count;
  int32_t rows_each;
};

// Whether a group of this warp, or this block, uses its row: their lanes act together.
template <int lanes>
RNNT_DEVICE bool any_group_uses(bool used) {
  return lanes > 32 ? used : __any_sync(0xffffffffu, used);
}

// Vectors that a lane loads at a time: many, but their elements have to stay in registers.
template <int width>
constexpr int kInFlight = width >= 8 ? 2 : 4;

// Loads this lane's vectors from column `begin` on, as far as they begin below V.
template <int lanes, int width, typename scalar>
RNNT_DEVICE void load_vectors(const scalar* row, int32_t begin, int32_t V,
                              Vector<scalar, width> (&loaded)[kInFlight<width>]) {
#pragma unroll
  for (int k = 0; k < kInFlight<width>; ++k) {
    const int32_t v = begin + k * lanes * width;
    if (v < V) loaded[k] = load_vector<width>(row + v);
  }
}

// Calls work(std::integral_constant<int, lanes>): 8 lanes for short rows, a warp, or a block for
// long rows that are too few to fill the device with warps.
template <typename Work>
void dispatch_lanes(int64_t V, int width, int64_t rows, Work&& work) {
  const int64_t vectors = (V + width - 1) / width;
  if (vectors <= 64) return work(std::integral_constant<int, kSmallGroup>());
  if (vectors <= 1024 || rows > 4096) return work(std::integral_constant<int, 32>());
  return work(std::integral_constant<int, kRowThreads>());
}

}  // namespace pruned_rnnt::cuda
