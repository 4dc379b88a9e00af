// The symbol that a lattice position emits.
#pragma once

#include "host_device.h"
#include "stable.h"

namespace pruned_rnnt {

struct SymbolTable {
  template <typename Array>
  SymbolTable(const Array& targets, int64_t vocabulary, int64_t blank)
      : symbols(data_of<int32_t>(targets)),
        U(int32_t(targets.size(1))),
        V(int32_t(vocabulary)),
        blank(int32_t(blank)) {}

  // Symbol u of utterance n; -1 if there is none, for the blank, and outside the vocabulary.
  PRUNED_RNNT_HOST_DEVICE int32_t symbol(int64_t n, int64_t u) const {
    if (u < 0 || u >= U) return -1;
    const int32_t y = symbols[n * U + u];
    return y >= 0 && y < V && y != blank ? y : -1;
  }

  // The symbol that a node (RowCursor) emits; -1 if it emits none.
  template <typename Node>
  PRUNED_RNNT_HOST_DEVICE int32_t emitted_from(const Node& node) const {
    return node.emits() ? symbol(node.n(), node.u()) : -1;
  }

  const int32_t* symbols;
  int32_t U, V, blank;
};

}  // namespace pruned_rnnt
