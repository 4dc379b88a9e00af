// A block's tile of a product of float32 matrices on tensor cores, as precise as float32 products
// without them, for numbers of rows that only the device knows.
//
// Each factor is split (tf32_product.cuh). Only short runs of kRun * 8 elements are summed by
// tensor cores, small terms first, and these sums by ordinary additions, which round to nearest:
//
//   k      0 ...... 15 | 16 ..... 31 | 32 ...       kRun = 2
//          tensor cores  tensor cores
//          run 0         run 1
//   sum =  run 0       + run 1       + ...          rounded to nearest
//
//   block tile           kStages tiles of each factor in shared memory: one is computed while the
//   +----+----+          others are on their way
//   |warp|warp|
//   +----+----+
//   |warp|warp|
//   +----+----+
#pragma once

#include "cuda/common/tf32_product.cuh"
#include "cuda/whole_lattice/product_operand.cuh"

namespace pruned_rnnt::cuda {

// Rows and columns of a block's tile and of a warp's; elements of the sum of a stage.
template <int rows, int columns, int depth, int stages, int warp_rows, int warp_columns, int run,
          int blocks>
struct ProductTile {
  static constexpr int kRows = rows, kColumns = columns, kDepth = depth, kStages = stages;
  static constexpr int kWarpRows = warp_rows, kWarpColumns = warp_columns;
  // Groups of 8 elements whose products tensor cores add up; blocks of a multiprocessor.
  static constexpr int kRun = run, kBlocks = blocks;
  static constexpr int kThreads = 32 * (rows / warp_rows) * (columns / warp_columns);
  static_assert(rows % warp_rows == 0 && columns % warp_columns == 0);
  static_assert(warp_rows % 16 == 0 && warp_columns % 16 == 0 && depth % (8 * run) == 0);
};

// A block's tile of the product of a and b, whose lines are as FactorTiles has them.
template <typename Tile, bool a_k_lines, bool b_k_lines, int width>
class BlockProduct {
 public:
  using A = FactorTiles<Tile::kRows, Tile::kDepth, Tile::kThreads, a_k_lines, width>;
  using B = FactorTiles<Tile::kColumns, Tile::kDepth, Tile::kThreads, b_k_lines, width>;
  static constexpr size_t kSharedBytes = sizeof(float) * Tile::kStages * (A::kFloats + B::kFloats);

  // Adds up elements k_begin .. k_end - 1 of the sums of the tile at (row, column) of a result of
  // this many rows and columns.
  RNNT_DEVICE void run(float* shared, const FactorLines& a_lines, const FactorLines& b_lines,
                       int32_t row, int32_t rows, int32_t column, int32_t columns, int32_t k_begin,
                       int32_t k_end) {
    A a(a_lines, row, rows, k_begin);
    B b(b_lines, column, columns, k_begin);
    const auto copy = [&](int32_t tile) {
      float* const stage = shared + tile % Tile::kStages * (A::kFloats + B::kFloats);
      const int32_t k_left = k_end - k_begin - tile * Tile::kDepth;
      if (k_left > 0) {
        a.copy(stage, k_left);
        b.copy(stage + A::kFloats, k_left);
      }
      commit_copies();
    };
    const int32_t tiles = (k_end - k_begin + Tile::kDepth - 1) / Tile::kDepth;
#pragma unroll
    for (int tile = 0; tile < Tile::kStages - 1; ++tile) copy(tile);
    for (int32_t tile = 0; tile < tiles; ++tile) {
      wait_copies<Tile::kStages - 2>();
      // All copies of this tile are visible, and all warps have read the one before.
      __syncthreads();
      copy(tile + Tile::kStages - 1);
      const float* const stage = shared + tile % Tile::kStages * (A::kFloats + B::kFloats);
#pragma unroll
      for (int k = 0; k < Tile::kDepth; k += 8 * Tile::kRun) add_run(stage, k);
    }
    wait_copies<0>();
  }

  // Calls store(row, column, x, y) for each pair of adjacent elements of this lane; row and column
  // are those of the block's tile.
  template <typename Store>
  RNNT_DEVICE void for_pairs(Store&& store) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const int row = warp_row() + i * 16 + lane / 4,
                  column = warp_column() + j * 8 + lane % 4 * 2;
        store(row, column, sum_[i][j][0], sum_[i][j][1]);
        store(row + 8, column, sum_[i][j][2], sum_[i][j][3]);
      }
    }
  }

 private:
  static constexpr int kRowTiles = Tile::kWarpRows / 16, kColumnTiles = Tile::kWarpColumns / 8;
  static constexpr int kWarpsAcross = Tile::kColumns / Tile::kWarpColumns;

  RNNT_DEVICE static int warp_row() {
    return int(threadIdx.x) / 32 / kWarpsAcross * Tile::kWarpRows;
  }
  RNNT_DEVICE static int warp_column() {
    return int(threadIdx.x) / 32 % kWarpsAcross * Tile::kWarpColumns;
  }

  // Adds the products of a run of elements, from k on in the stage.
  RNNT_DEVICE void add_run(const float* stage, int k) {
    constexpr int run = Tile::kRun;
    float b_high[run][kColumnTiles][2], b_low[run][kColumnTiles][2];
#pragma unroll
    for (int r = 0; r < run; ++r) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 2) {
        float x[2], y[2];
        B::columns_fragments(stage + A::kFloats, warp_column() + j * 8, k + r * 8, x, y);
        split(x, b_high[r][j], b_low[r][j]);
        split(y, b_high[r][j + 1], b_low[r][j + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float a_high[run][4], a_low[run][4], of_run[kColumnTiles][4];
#pragma unroll
      for (int r = 0; r < run; ++r) {
        float x[4];
        A::rows_fragment(stage, warp_row() + i * 16, k + r * 8, x);
        split(x, a_high[r], a_low[r]);
      }
      // Neighbouring instructions have different sums, so that none waits for the one before.
#pragma unroll
      for (int r = 0; r < run; ++r) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) multiply(of_run[j], a_low[r], b_high[r][j], r > 0);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) multiply(of_run[j], a_high[r], b_low[r][j], true);
      }
#pragma unroll
      for (int r = 0; r < run; ++r) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) multiply(of_run[j], a_high[r], b_high[r][j], true);
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum_[i][j][e] += of_run[j][e];
      }
    }
  }

  float sum_[kRowTiles][kColumnTiles][4] = {};
};

}  // namespace pruned_rnnt::cuda
