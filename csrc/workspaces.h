// Sizes of the workspaces of ops. Python has the same formulas, split_workspace and tdt_workspace
// of pruned_rnnt/ops/lattice and parts_of of matrix_products.py, because torch.compile traces them
// with symbolic sizes; tests/ops/test_step_layout.py compares them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pruned_rnnt {

// Elements of lattice and band_lattice, with up to `columns` nodes of a frame and `frames` in all;
// cuda/lattice/halves.cuh divides them.
constexpr int64_t cut_elements(int64_t utterances, int64_t columns, int64_t frames) {
  return utterances * (5 * columns + 8) + 4 * frames;
}

// Elements of tdt_lattice for lattices of so many rows in all: the pairs of all nodes
// (cuda/lattice/tdt_nodes.cuh), and a ring of steps for each utterance.
constexpr int64_t tdt_elements(int64_t rows, int64_t utterances, int64_t symbols, int64_t durations,
                               int64_t longest) {
  return 2 * (durations + 3) * rows + utterances * 4 * (longest + 2) * (symbols + 2);
}

// Rows of the workspace (P,C) of column_sums.
constexpr int64_t parts_of(int64_t rows, int64_t columns) {
  const int64_t most = std::max<int64_t>(1, 512 * 1024 / std::max<int64_t>(columns, 1024));
  return std::min(std::max<int64_t>(1, rows / 32), most);
}

}  // namespace pruned_rnnt
