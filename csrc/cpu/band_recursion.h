// Alpha and beta of one utterance (cpu/band_utterance.h). The recursion and its boundary cases are
// stated in pruned_rnnt/ops/lattice.py and band_lattice.py.
//
// `regular` has an arc inside the frame, so that a frame's values wait for each other: a full
// lattice, whose frames lie in line, goes sixteen frames at a time (cpu/wave.h). A band is short,
// and its frames are shifted against each other: it goes frame by frame.
#pragma once

#include "cpu/band_utterance.h"
#include "cpu/wave.h"

namespace pruned_rnnt {

struct AlphaRecursion {
  // Writes alpha and returns log P. `scratch` has room for three frames.
  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE real run(const Utterance<real>& lattice, real* scratch) {
    const int64_t width = lattice.width;
    real* arriving = scratch;
    real* emitted = scratch + width;
    real* shifted = scratch + 2 * width;
    for (int64_t t = 0; t < lattice.frames; ++t) {
      real* alpha = lattice.alpha + lattice.row(t);
      const int64_t first = lattice.first_symbol(t), columns = lattice.columns(t);
      if (t == 0) {
        std::fill(arriving, arriving + width, minus_infinity<real>);
        if (first == 0) arriving[0] = 0;
      } else {
        const real* before = lattice.alpha + lattice.row(t - 1);
        const real* py = lattice.py + lattice.row(t - 1);
        const int64_t shift = first - lattice.first_symbol(t - 1);
        if (topology != Topology::kRegular) {
          emission_scores<topology>(lattice, t - 1, emitted);
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) emitted[j] += before[j];
          shift_columns(emitted, width, shift - 1, arriving);
        }
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) alpha[j] = before[j] + py[j];
        shift_columns(alpha, width, shift, topology == Topology::kRegular ? arriving : shifted);
        if (topology != Topology::kRegular) {
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) arriving[j] = log_add(arriving[j], shifted[j]);
        }
      }
      if (topology == Topology::kRegular) {
        emission_scores<topology>(lattice, t, emitted);
        for (int64_t j = 1; j < columns; ++j) {
          arriving[j] = log_add(arriving[j], arriving[j - 1] + emitted[j - 1]);
        }
      }
      std::copy(arriving, arriving + columns, alpha);
      std::fill(alpha + columns, alpha + width, minus_infinity<real>);
    }
    return total<topology>(lattice, emitted);
  }

  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE real total(const Utterance<real>& lattice, real* emitted) {
    const int64_t t = lattice.frames - 1;
    const int64_t j = lattice.symbols - lattice.first_symbol(t);
    real sum = minus_infinity<real>;
    const real* alpha = lattice.alpha + lattice.row(t);
    if (j >= 0 && j < lattice.width) sum = alpha[j] + lattice.py[lattice.row(t) + j];
    if (ends_with_symbol(topology) && j >= 1 && j <= lattice.width) {
      emission_scores<topology>(lattice, t, emitted);
      sum = log_add(sum, alpha[j - 1] + emitted[j - 1]);
    }
    return sum;
  }
};

struct BetaRecursion {
  // Writes beta. `scratch` has room for three frames.
  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE void run(const Utterance<real>& lattice, real* scratch) {
    const int64_t width = lattice.width;
    real* blank_end = scratch;
    real* symbol_end = scratch + width;
    real* emitted = scratch + 2 * width;
    for (int64_t t = lattice.frames - 1; t >= 0; --t) {
      real* beta = lattice.beta + lattice.row(t);
      const real* py = lattice.py + lattice.row(t);
      const int64_t columns = lattice.columns(t);
      beta_behind<topology>(lattice, t, blank_end, symbol_end);
      emission_scores<topology>(lattice, t, emitted);
      if (topology == Topology::kRegular) {
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) beta[j] = py[j] + blank_end[j];
        for (int64_t j = columns - 2; j >= 0; --j) {
          beta[j] = log_add(beta[j], beta[j + 1] + emitted[j]);
        }
      } else {
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
          beta[j] = log_add(py[j] + blank_end[j], emitted[j] + symbol_end[j]);
        }
      }
      std::fill(beta + columns, beta + width, minus_infinity<real>);
    }
  }
};

// Alpha of a full regular lattice by waves of frames; returns log P.
struct FullRegularAlpha {
  template <typename real>
  static PRUNED_RNNT_INLINE real run(const Utterance<real>* lattice, real* scratch) {
    const int64_t size = lattice->symbols + 1, width = lattice->width;
    real* edge = scratch + wave_scratch(size);
    // Before the first frame lies the start, as if a blank of score 0 led from it.
    std::fill(edge, edge + size, minus_infinity<real>);
    edge[0] = 0;
    WaveRow<real> rows[kWaveRows];
    for (int64_t first = 0; first < lattice->frames; first += kWaveRows) {
      const int64_t count = std::min(kWaveRows, lattice->frames - first);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t t = first + k;
        real* alpha = lattice->alpha + lattice->row(t);
        rows[k] = {lattice->px + lattice->row(t) - 1, lattice->delay(t),
                   t > 0 ? lattice->py + lattice->row(t - 1) : nullptr, alpha};
        std::fill(alpha + size, alpha + width, minus_infinity<real>);
      }
      LogAddWave::run(rows, count, size, 1, edge, scratch);
    }
    return edge[size - 1] + lattice->py[lattice->row(lattice->frames - 1) + size - 1];
  }
};

// Beta of a full regular lattice: the same from the last frame and the last column back.
struct FullRegularBeta {
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const Utterance<real>* lattice, real* scratch) {
    const int64_t size = lattice->symbols + 1, width = lattice->width;
    real* edge = scratch + wave_scratch(size);
    std::fill(edge, edge + size, minus_infinity<real>);
    edge[0] = 0;
    WaveRow<real> rows[kWaveRows];
    for (int64_t done = 0; done < lattice->frames; done += kWaveRows) {
      const int64_t count = std::min(kWaveRows, lattice->frames - done);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t t = lattice->frames - 1 - done - k, last = lattice->row(t) + size - 1;
        rows[k] = {lattice->px + last, lattice->delay(t), lattice->py + last, lattice->beta + last};
        std::fill(lattice->beta + last + 1, lattice->beta + lattice->row(t) + width,
                  minus_infinity<real>);
      }
      LogAddWave::run(rows, count, size, -1, edge, scratch);
    }
  }
};

}  // namespace pruned_rnnt
