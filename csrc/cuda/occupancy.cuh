// Occupancies of the nodes of lattices kept as rows, from alpha, beta and log P:
// gx = exp(alpha + px + beta behind the symbol - log P), gy the same with the blank
// (pruned_rnnt/ops/lattice.py).
//
// Axes: N utterances, T frames, W columns of a frame (j), R rows.
#pragma once

#include "cuda/row_cursor.cuh"
#include "cuda/topology.cuh"

namespace pruned_rnnt {
namespace cuda {

template <typename real>
struct LatticeArrays {
  const real *px, *py;
  real *alpha, *beta, *total, *gx, *gy;
};

// Writes gx and gy of one row, and alpha and beta too where there is no node.
template <Topology topology, typename real>
__device__ __forceinline__ void write_occupancy(const LatticeArrays<real>& arrays, int64_t row,
                                                const BandNode& node, real total,
                                                real delay_penalty) {
  const real none = minus_infinity<real>();
  if (!node.valid()) {
    arrays.alpha[row] = arrays.beta[row] = none;
    arrays.gx[row] = arrays.gy[row] = real(0);
    return;
  }
  if (total == none) {
    arrays.gx[row] = arrays.gy[row] = real(0);
    return;
  }
  const bool last_frame = node.t == node.frames - 1;
  // beta of the node that the blank leads to, and of the one that the symbol leads to.
  const auto beta_after = [&](int32_t symbols_up) {
    const int32_t column = node.column + node.shift + symbols_up;
    const bool inside = column >= 0 && column < node.width;
    return inside ? arrays.beta[row - node.column + node.width + column] : none;
  };
  const auto at_end = [&](bool is_end) { return is_end ? real(0) : none; };
  const bool emits = node.u < node.symbols;
  const bool has_neighbour = emits && node.column + 1 < node.width;
  const real behind_blank = last_frame ? at_end(node.u == node.symbols) : beta_after(0);
  real behind_symbol = none;
  if (!emits) {
    // There is no node behind, and nothing has been written in its place.
  } else if (topology == Topology::kRegular) {
    behind_symbol = has_neighbour ? arrays.beta[row + 1] : none;
  } else if (last_frame) {
    behind_symbol = at_end(ends_with_symbol(topology) && node.u + 1 == node.symbols);
  } else {
    behind_symbol = beta_after(1);
  }
  const real delay =
      delay_penalty == 0
          ? real(0)
          : delay_penalty * (static_cast<real>(node.frames - 1) / 2 - static_cast<real>(node.t));
  const real alpha = arrays.alpha[row], py = arrays.py[row];
  real emit = none;
  if (emits) {
    emit = arrays.px[row] + delay;
    if (topology == Topology::kConstrained) emit += has_neighbour ? arrays.py[row + 1] : none;
  }
  arrays.gx[row] = exp_of(alpha + emit + behind_symbol - total);
  real stay = exp_of(alpha + py + behind_blank - total);
  if (topology == Topology::kConstrained && node.column > 0 && node.u > 0) {
    // This blank is also part of the emit that ends in the same column.
    stay += exp_of(arrays.alpha[row - 1] + arrays.px[row - 1] + delay + py + behind_blank - total);
  }
  arrays.gy[row] = stay;
}

constexpr int kOccupancyThreads = 256;
constexpr int kRowsEach = 4;

template <Topology topology, typename real>
__global__ void __launch_bounds__(kOccupancyThreads)
    occupancy_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                     LatticeArrays<real> arrays) {
  int64_t row = static_cast<int64_t>(blockIdx.x) * kOccupancyThreads * kRowsEach + threadIdx.x;
  if (row >= rows) return;
  RowCursor cursor(geometry, row);
  for (int i = 0; i < kRowsEach; ++i) {
    write_occupancy<topology>(arrays, row, cursor.node(), arrays.total[cursor.n()], delay_penalty);
    row += kOccupancyThreads;
    if (row >= rows) return;
    cursor.advance(kOccupancyThreads);
  }
}

}  // namespace cuda
}  // namespace pruned_rnnt
