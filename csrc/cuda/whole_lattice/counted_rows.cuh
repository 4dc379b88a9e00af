// Kernels of products of float32 matrices whose number of rows only the device knows.
// Contracts: pruned_rnnt/ops/common/matrix_products.py.
//
//   counted_rows_product             counted_rows_sums, G = 2
//
//          k          n                  m               n          block 0   block 1
//      +-------+    +----+            +-------+        +----+          n         n
//      |       |  k |    |            |block 0|        | 0  |        +----+    +----+
//   R  |       |    +----+  + bias  R |.......|        |....|      m |    |  m |    |
//      |-------| count                |block 1|        | 1  |        +----+    +----+
//      |unread |                      |-------| count  |----|
//      +-------+                      +-------+        +----+
//
// Grids cover all R rows; thread blocks behind the count end at once. Sums have a fixed order for
// each count.
//
// Axes: R rows, m and n columns of a result, k elements of a sum, G blocks of the rows.
#pragma once

#include "cuda/whole_lattice/float_product.cuh"

namespace pruned_rnnt::cuda {

// The first rows of a matrix that exist: as many as `total` has from row `begin` on, at most
// `most`.
struct RowCount {
  const int64_t* total;
  int64_t begin;
  int32_t most;

  RNNT_DEVICE int32_t operator()() const {
    return int32_t(min(max(*total - begin, int64_t(0)), int64_t(most)));
  }
};

struct ProductResult {
  float* data;
  int64_t stride;  // of rows
  int32_t columns;
  bool pairs;  // rows begin at multiples of 8 bytes

  // The elements of this column and the next.
  RNNT_DEVICE void store(int32_t row, int32_t column, float x, float y, bool add) const {
    float* const at = data + row * stride + column;
    if (add) {
      x += column < columns ? at[0] : 0.0f;
      y += column + 1 < columns ? at[1] : 0.0f;
    }
    if (pairs && column + 1 < columns) {
      *reinterpret_cast<float2*>(at) = make_float2(x, y);
      return;
    }
    if (column < columns) at[0] = x;
    if (column + 1 < columns) at[1] = y;
  }
};

// bias: null for none.
template <typename Tile, bool b_k_lines, int width>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    counted_rows_product_kernel(FactorLines a, FactorLines b, const float* __restrict__ bias,
                                RowCount count, int32_t depth, ProductResult out) {
  const int32_t tiles = (out.columns + Tile::kColumns - 1) / Tile::kColumns;
  const int32_t rows = count(), first_row = int32_t(blockIdx.x) / tiles * Tile::kRows;
  const int32_t first_column = int32_t(blockIdx.x) % tiles * Tile::kColumns;
  if (first_row >= rows) return;
  BlockProduct<Tile, false, b_k_lines, width> product;
  product.run(dynamic_shared_memory<float>(), a, b, first_row, rows, first_column, out.columns, 0,
              depth);
  product.for_pairs([&](int row_of_tile, int column_of_tile, float x, float y) {
    const int32_t row = first_row + row_of_tile, column = first_column + column_of_tile;
    if (row >= rows) return;
    if (bias != nullptr) {
      x += column < out.columns ? bias[column] : 0.0f;
      y += column + 1 < out.columns ? bias[column + 1] : 0.0f;
    }
    out.store(row, column, x, y, false);
  });
}

// gridDim.y: blocks of the rows, whose results follow each other. rows: of a result. add: to what
// they have.
template <typename Tile, int width>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    counted_rows_sums_kernel(FactorLines a, FactorLines b, RowCount count, int32_t rows, bool add,
                             ProductResult out) {
  const int32_t tiles = (out.columns + Tile::kColumns - 1) / Tile::kColumns;
  const int32_t first_row = int32_t(blockIdx.x) / tiles * Tile::kRows;
  const int32_t first_column = int32_t(blockIdx.x) % tiles * Tile::kColumns;
  const int32_t depth = count(), blocks = int32_t(gridDim.y);
  // Of about the same size, in groups of 8 rows, as tensor cores take them.
  const int32_t each = ((depth + blocks - 1) / blocks + 7) / 8 * 8;
  const int32_t begin = min(depth, int32_t(blockIdx.y) * each);
  if (add && begin == depth) return;
  BlockProduct<Tile, true, true, width> product;
  product.run(dynamic_shared_memory<float>(), a, b, first_row, rows, first_column, out.columns,
              begin, min(depth, begin + each));
  out.data += blockIdx.y * rows * out.stride;
  product.for_pairs([&](int row_of_tile, int column_of_tile, float x, float y) {
    const int32_t row = first_row + row_of_tile;
    if (row < rows) out.store(row, first_column + column_of_tile, x, y, add);
  });
}

}  // namespace pruned_rnnt::cuda
