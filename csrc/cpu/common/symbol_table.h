// The symbol that a lattice position emits.
#pragma once

#include "stable.h"

namespace pruned_rnnt {

struct SymbolTable {
  SymbolTable(const Tensor& targets, int64_t vocabulary, int64_t blank)
      : targets(data_of<int32_t>(targets)), U(targets.size(1)), V(vocabulary), blank(blank) {}

  // The symbol emitted at position u; negative for the blank and for one not in the vocabulary.
  int64_t symbol(int64_t n, int64_t u) const {
    const int64_t y = u < U ? targets[n * U + u] : -1;
    return y < V && y != blank ? y : -1;
  }

  const int32_t* targets;
  int64_t U, V, blank;
};

}  // namespace pruned_rnnt
