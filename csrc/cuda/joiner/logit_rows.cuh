// How rows of logits are shared out among threads: a group of lanes takes a row, and the groups of
// a block take rows side by side, a few one after the other, so that finding the node of a row is
// paid once.
//
// Axes: R rows, V vocabulary.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int kRowThreads = 256;

enum class LogitMode : int32_t { kSoftmax = 0, kLogProbs = 1, kHat = 2 };

// Rows begin .. begin + count of the geometry, rows_each for every group.
struct RowRange {
  template <int lanes>
  static RowRange of(int64_t begin, int64_t count) {
    RowRange range{begin, count, 1};
    // Short rows are grouped as long as that leaves the device enough blocks.
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
    return static_cast<uint32_t>((count + rows_a_block - 1) / rows_a_block);
  }
  template <int lanes>
  __device__ __forceinline__ int64_t first_row() const {
    return static_cast<int64_t>(blockIdx.x) * groups_abreast<lanes>() * rows_each +
           threadIdx.x / lanes;
  }

  int64_t begin, count;
  int32_t rows_each;
};

// Whether any group that must act together with this one (in its warp, in its block) uses its row.
template <int lanes>
__device__ __forceinline__ bool any_group_uses(bool used) {
  return lanes > 32 ? used : __any_sync(0xffffffffu, used);
}

// Calls work(std::integral_constant<int, lanes>): 8 lanes for short rows, a warp, or a whole block
// for long rows of which there are too few to fill the device with warps.
template <typename Work>
void dispatch_lanes(int64_t V, int width, int64_t rows, Work&& work) {
  const int64_t vectors = (V + width - 1) / width;
  if (vectors <= 32) return work(std::integral_constant<int, 8>());
  if (vectors <= 1024 || rows > 8192) return work(std::integral_constant<int, 32>());
  return work(std::integral_constant<int, kRowThreads>());
}

}  // namespace cuda
}  // namespace pruned_rnnt
