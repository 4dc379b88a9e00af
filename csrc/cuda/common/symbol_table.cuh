// The symbol that a lattice position emits.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

struct SymbolTable {
  SymbolTable(const View& targets, int64_t vocabulary, int64_t blank)
      : symbols(data_of<int32_t>(targets)),
        U(int32_t(targets.size(1))),
        V(int32_t(vocabulary)),
        blank(int32_t(blank)) {}

  // Symbol u of utterance n; -1 if there is none, for the blank, and outside the vocabulary.
  RNNT_DEVICE int32_t symbol(int32_t n, int32_t u) const {
    if (u < 0 || u >= U) return -1;
    const int32_t y = symbols[int64_t(n) * U + u];
    return y >= 0 && y < V && y != blank ? y : -1;
  }

  const int32_t* symbols;
  int32_t U, V, blank;
};

}  // namespace pruned_rnnt::cuda
