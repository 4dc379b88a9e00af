// Sizes of the workspaces (`work`) of ops, as split_workspace and tdt_workspace in
// pruned_rnnt/ops/lattice make them; contracts compare the two.
#pragma once

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

}  // namespace pruned_rnnt
