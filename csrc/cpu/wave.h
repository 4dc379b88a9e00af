// A first-order recursion over rows of nodes, sixteen rows at a time.
//
//   value(r, i) = log_add(value(r, i-1) + along(r, i), value(r-1, i) + across(r, i))
//
// Inside one row each value waits for the one before it. Along an anti-diagonal none waits for
// another: lane k of a vector works on row k at column s - k in step s, takes `along` from its own
// value of the step before and `across` from its neighbour's. The scores are therefore laid out by
// steps first.
#pragma once

#include <algorithm>

#include "log_math.h"

namespace pruned_rnnt {

constexpr int64_t kWaveRows = 16;

// One row. All pointers are to the element of column 0; column i lies i * direction further.
template <typename real>
struct WaveRow {
  const real* along;   // read for columns 1..size-1
  real added;          // to every `along`
  const real* across;  // null counts as 0 everywhere
  real* value;         // written
};

inline int64_t wave_scratch(int64_t size) { return 3 * (size + kWaveRows) * (kWaveRows + 1); }

struct LogAddWave {
  // Rows 0..count-1 (at most kWaveRows) of `size` columns. `edge` (size) holds the row before them,
  // and afterwards the last of them; `scratch` has wave_scratch(size) elements.
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const WaveRow<real>* rows, int64_t count, int64_t size,
                                     int64_t direction, real* edge, real* scratch) {
    constexpr int64_t K = kWaveRows;
    const int64_t steps = size + count - 1;
    real* along = scratch;
    real* across = along + steps * K;
    // Row s + 1 holds step s; in it, element k + 1 is lane k and element 0 is the edge.
    real* values = across + steps * K;
    std::fill(along, values, minus_infinity<real>);
    std::fill(values, values + K + 1, minus_infinity<real>);
    for (int64_t k = 0; k < count; ++k) {
      const WaveRow<real>& row = rows[k];
      for (int64_t i = 1; i < size; ++i) {
        along[(i + k) * K + k] = row.along[i * direction] + row.added;
      }
      for (int64_t i = 0; i < size; ++i) {
        across[(i + k) * K + k] = row.across != nullptr ? row.across[i * direction] : real(0);
      }
    }
    for (int64_t s = 0; s <= steps; ++s) {
      values[s * (K + 1)] = s < size ? edge[s] : minus_infinity<real>;
    }
    for (int64_t s = 0; s < steps; ++s) {
      const real* before = values + s * (K + 1);
      real* now = values + (s + 1) * (K + 1) + 1;
#pragma omp simd
      for (int64_t k = 0; k < K; ++k) {
        now[k] = log_add(before[k + 1] + along[s * K + k], before[k] + across[s * K + k]);
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t i = 0; i < size; ++i) {
        rows[k].value[i * direction] = values[(i + k + 1) * (K + 1) + k + 1];
      }
    }
    for (int64_t i = 0; i < size; ++i) edge[i] = values[(i + count) * (K + 1) + count];
  }
};

}  // namespace pruned_rnnt
