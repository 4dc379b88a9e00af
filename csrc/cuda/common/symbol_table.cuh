// Which symbol a lattice position emits.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

struct SymbolTable {
  SymbolTable(const View& targets, int64_t vocabulary, int64_t blank)
      : symbols(data_of<int32_t>(targets)),
        U(static_cast<int32_t>(targets.size(1))),
        V(static_cast<int32_t>(vocabulary)),
        blank(static_cast<int32_t>(blank)) {}

  // Symbol number u of utterance n; -1 where there is none, or none that can be emitted.
  __device__ __forceinline__ int32_t symbol(int32_t n, int32_t u) const {
    if (u < 0 || u >= U) return -1;
    const int32_t y = symbols[static_cast<int64_t>(n) * U + u];
    return y >= 0 && y < V && y != blank ? y : -1;
  }

  const int32_t* symbols;
  int32_t U, V, blank;
};

}  // namespace cuda
}  // namespace pruned_rnnt
