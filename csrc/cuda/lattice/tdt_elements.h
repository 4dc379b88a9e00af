// Size of tdt_lattice's `work`, as tdt_workspace in pruned_rnnt/ops/lattice/tdt_lattice.py; also
// for code without a CUDA compiler.
#pragma once

#include <cstdint>

namespace pruned_rnnt::cuda {

// Elements for lattices of so many rows in all: the pairs of all nodes (tdt_nodes.cuh), and a ring
// of steps for each utterance.
constexpr int64_t tdt_elements(int64_t rows, int64_t utterances, int64_t symbols, int64_t durations,
                               int64_t longest) {
  return 2 * (durations + 3) * rows + utterances * 4 * (longest + 2) * (symbols + 2);
}

}  // namespace pruned_rnnt::cuda
