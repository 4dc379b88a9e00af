// The recursion of pruned_rnnt/ops/lattice/lattice.py over rows of nodes, sixteen rows at a time.
//
// From every node one arc leads along its row, to the next column, and one across, to the next row:
//
//   backward  beta(r,c) = log_add(beta(r,c+1) + along(r,c), beta(r+1,c+lag-1) + across(r,c))
//   forward   mass(r,c) = along from (r,c-1) + across from (r-1,c-lag+1)
//
// lag is 1, or 2 if the arc across also advances a column. In rows of frames emits go along the
// row, in rows of symbols across. The nodes of a row depend on each other; those of an
// anti-diagonal do not. Lane k of a vector computes the k-th row of the walk, and in step s the
// (s-k)-th column of the walk:
//
//            step s-2   s-1     s
//   lane k-1   s-k-1   s-k    s-k+1       lane k needs its own node of the step before, and its
//   lane k     s-k-2   s-k-1  s-k         neighbour's of step s-lag
//
// Scores, shares and occupancies are therefore stored by step. The backward walk counts columns and
// rows from their ends.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/lattice/arc_shares.h"

namespace pruned_rnnt {

constexpr int64_t kWaveRows = 16;

// Pointers to the first column of a row. gx holds the arc shares between the two walks.
template <typename real>
struct WaveRow {
  const real* px;  // null if no symbol can be emitted
  const real* py;
  const real* py_above;  // added to px of the same column; or null
  double delay;          // added to px
  real* gx;              // null with px
  real* gy;
};

// Columns of the rows of a lattice: the last `closed` ones have no emit; gx stores the first
// emit_size, gy the first blank_size.
struct WaveShape {
  int64_t size, closed, emit_size, blank_size;
};

// Scratch for rows of `size` columns; `edge` passes from one group of rows to the next.
template <typename real>
struct WaveScratch {
  explicit WaveScratch(int64_t size)
      : lanes(3 * (size + kWaveRows) * kWaveRows),
        scores(2 * (size + kWaveRows) * kWaveRows),
        values((size + kWaveRows + 2) * (kWaveRows + 1)),
        edge(size) {}

  std::vector<real> lanes;
  std::vector<double> scores, values, edge;
};

// Values by step and lane, with room for one lane before the first (the previous row) and for `lag`
// steps before the first.
template <int lag>
struct WaveValues {
  double* data;

  PRUNED_RNNT_INLINE double* step(int64_t s) const {
    return data + (s + lag) * (kWaveRows + 1) + 1;
  }
  // Stores the previous row, `edge` (size), and `none` before the first step.
  PRUNED_RNNT_INLINE void begin(const double* edge, int64_t size, int64_t steps,
                                double none) const {
    std::fill(data, data + lag * (kWaveRows + 1), none);
    for (int64_t s = -1; s + 1 < steps; ++s) step(s)[-1] = s + 1 < size ? edge[s + 1] : none;
  }
};

// Rows last_row, last_row - 1, ..., `count` of them: writes their arc shares to gx. The scratch's
// edge is beta of the row behind, and then of the last row walked, from the last column on. begins:
// last_row is the lattice's last.
template <bool rows_are_frames, int lag>
struct BackwardWave {
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const WaveRow<real>* last_row, int64_t count,
                                     const WaveShape* shape, bool begins,
                                     WaveScratch<real>* scratch) {
    constexpr int64_t K = kWaveRows;
    const int64_t size = shape->size, steps = size + count - 1;
    double *emits = scratch->scores.data(), *blanks = emits + steps * K;
    real* shares = scratch->lanes.data();
    const WaveValues<lag> values{scratch->values.data()};
    std::fill(emits, blanks + steps * K, minus_infinity<double>);
    for (int64_t k = 0; k < count; ++k) {
      const WaveRow<real>& row = last_row[-k];
      // The arc along from the walk's first column leads nowhere.
      const int64_t emit_begin =
          row.px == nullptr ? size : std::max<int64_t>(shape->closed, rows_are_frames);
      for (int64_t i = emit_begin; i < size; ++i) {
        const int64_t column = size - 1 - i;
        const double above = row.py_above != nullptr ? row.py_above[column] : 0;
        emits[(i + k) * K + k] = row.px[column] + row.delay + above;
      }
      for (int64_t i = !rows_are_frames; i < size; ++i) {
        blanks[(i + k) * K + k] = row.py[size - 1 - i];
      }
    }
    double* edge = scratch->edge.data();
    if (begins) std::fill(edge, edge + size, minus_infinity<double>);
    // The last blank leaves the last row of frames, or leads to the last node of a row of symbols.
    if (begins && rows_are_frames) edge[0] = 0;
    values.begin(edge, size, steps, minus_infinity<double>);
    if (begins && !rows_are_frames) values.step(-1)[0] = blanks[0] = 0;
    for (int64_t s = 0; s < steps; ++s) {
      const double* along = values.step(s - 1);
      const double* across = values.step(s - lag) - 1;
      double* now = values.step(s);
#pragma omp simd
      for (int64_t k = 0; k < K; ++k) {
        const double emitted = emits[s * K + k] + (rows_are_frames ? along : across)[k];
        const double stayed = blanks[s * K + k] + (rows_are_frames ? across : along)[k];
        now[k] = log_add_shared(emitted, stayed, shares[s * K + k]);
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      real* gx = last_row[-k].gx;
      if (gx == nullptr) continue;
      for (int64_t i = size - shape->emit_size; i < size; ++i) {
        gx[size - 1 - i] = shares[(i + k) * K + k];
      }
    }
    for (int64_t i = 0; i < size; ++i) edge[i] = values.step(i + count - 1)[count - 1];
  }
};

// Rows first_row, first_row + 1, ..., `count` of them: replaces arc shares by occupancies. The
// scratch's edge is the mass of the arcs across from the row before, and then from the last row
// walked. begins: first_row is the lattice's first.
template <bool rows_are_frames, int lag>
struct ForwardWave {
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const WaveRow<real>* first_row, int64_t count,
                                     const WaveShape* shape, bool begins,
                                     WaveScratch<real>* scratch) {
    constexpr int64_t K = kWaveRows;
    const int64_t size = shape->size, steps = size + count - 1;
    real *shares = scratch->lanes.data(), *gx = shares + steps * K, *gy = gx + steps * K;
    // Masses of the arcs across.
    const WaveValues<lag> values{scratch->values.data()};
    std::fill(shares, shares + steps * K, real(0));
    for (int64_t k = 0; k < count; ++k) {
      if (first_row[k].gx == nullptr) continue;
      for (int64_t i = 0; i < shape->emit_size; ++i) {
        shares[(i + k) * K + k] = first_row[k].gx[i];
      }
    }
    double* edge = scratch->edge.data();
    if (begins) std::fill(edge, edge + size, 0.0);
    values.begin(edge, size, steps, 0);
    double along[K] = {begins ? 1.0 : 0.0};
    for (int64_t s = 0; s < steps; ++s) {
      const double* across = values.step(s - lag) - 1;
      double* now = values.step(s);
#pragma omp simd
      for (int64_t k = 0; k < K; ++k) {
        const double mass = along[k] + across[k];
        const ArcShares share = split_share(shares[s * K + k]);
        const double emit = mass * share.emit, blank = mass * share.blank;
        along[k] = rows_are_frames ? emit : blank;
        now[k] = rows_are_frames ? blank : emit;
        gx[s * K + k] = static_cast<real>(emit);
        gy[s * K + k] = static_cast<real>(blank);
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      const WaveRow<real>& row = first_row[k];
      const int64_t emit_size = row.gx != nullptr ? shape->emit_size : 0;
      for (int64_t i = 0; i < emit_size; ++i) row.gx[i] = gx[(i + k) * K + k];
      for (int64_t i = 0; i < shape->blank_size; ++i) row.gy[i] = gy[(i + k) * K + k];
    }
    for (int64_t i = 0; i < size; ++i) edge[i] = values.step(i + count - 1)[count - 1];
  }
};

}  // namespace pruned_rnnt
