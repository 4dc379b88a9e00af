// The recursion of pruned_rnnt/ops/lattice/lattice.py over the rows of one utterance, frame by
// frame:
//
//   beta(t,u) = log_add(emit(t,u) + beta(target of the emit), blank(t,u) + beta(t+1,u))
//   mass(t,u) = sum over the arcs to (t,u) of mass(source) * share of the arc
//
// Whole `regular` lattices go as a wave instead (wave.h), because the nodes of a frame depend on
// each other. The frames of a band are short and shifted against each other.
//
// Axes: T frames, U symbols, W columns of a frame (j), u = start + j.
#pragma once

#include "cpu/lattice/wave.h"
#include "row_geometry.h"
#include "topology.h"

namespace pruned_rnnt {

// target[j] = source[j + shift], or `none` if j + shift is outside 0..width-1.
PRUNED_RNNT_INLINE void shift_columns(const double* source, int64_t width, int64_t shift,
                                      double none, double* target) {
  const int64_t begin = std::min(width, std::max<int64_t>(-shift, 0));
  const int64_t end = std::max(begin, std::min(width, width - shift));
  std::fill(target, target + begin, none);
  std::copy(source + begin + shift, source + end + shift, target + begin);
  std::fill(target + end, target + width, none);
}

// One utterance's part of the arrays. gx holds the arc shares between the two walks.
template <typename real>
struct Utterance {
  const RowGeometry& geometry;
  const real *px, *py;
  real *gx, *gy;
  int64_t n, frames, symbols, width;
  double delay_penalty;

  int64_t row(int64_t t) const { return t * width; }
  int64_t first_symbol(int64_t t) const { return geometry.first_symbol_of(n, t); }
  // Added to px at frame t.
  double delay(int64_t t) const {
    return delay_penalty * (static_cast<double>(frames - 1) / 2 - static_cast<double>(t));
  }
  // Columns of frame t that are symbol positions of this utterance.
  int64_t columns(int64_t t) const {
    return std::max<int64_t>(0, std::min(width, symbols + 1 - first_symbol(t)));
  }
};

// Writes the arc shares of all nodes to gx and returns log P. `scratch` has room for four frames.
template <Topology topology>
struct BackwardFrames {
  template <typename real>
  static PRUNED_RNNT_INLINE double run(const Utterance<real>* utterance, double* scratch) {
    const Utterance<real>& lattice = *utterance;
    const int64_t width = lattice.width;
    // behind_*: beta of the nodes that a blank and an emit lead to.
    double *beta = scratch, *emitted = scratch + 3 * width;
    double *behind_blank = scratch + width, *behind_symbol = scratch + 2 * width;
    int64_t behind = 0;
    for (int64_t t = lattice.frames - 1; t >= 0; --t) {
      const int64_t first = lattice.first_symbol(t), columns = lattice.columns(t);
      if (t == lattice.frames - 1) {
        std::fill(behind_blank, behind_blank + 2 * width, minus_infinity<double>);
        const int64_t last = lattice.symbols - first;
        if (last >= 0 && last < width) behind_blank[last] = 0;
        if (ends_with_symbol(topology) && last >= 1 && last <= width) behind_symbol[last - 1] = 0;
      } else {
        shift_columns(beta, width, first - behind, minus_infinity<double>, behind_blank);
        shift_columns(beta, width, first - behind + 1, minus_infinity<double>, behind_symbol);
      }
      const real* px = lattice.px + lattice.row(t);
      const real* py = lattice.py + lattice.row(t);
      real* shares = lattice.gx + lattice.row(t);
      const double delay = lattice.delay(t);
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) {
        behind_blank[j] += py[j];
        emitted[j] = px[j] + delay;
      }
      if (topology == Topology::kConstrained) {
        for (int64_t j = 0; j + 1 < columns; ++j) emitted[j] += py[j + 1];
        // The blank that belongs to an emit must also be inside the band.
        if (columns > 0) emitted[columns - 1] = minus_infinity<double>;
      }
      if (topology == Topology::kRegular) {
        double above = minus_infinity<double>;
        for (int64_t j = columns - 1; j >= 0; --j) {
          above = log_add_shared(emitted[j] + above, behind_blank[j], shares[j]);
          beta[j] = above;
        }
      } else {
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
          beta[j] = log_add_shared(emitted[j] + behind_symbol[j], behind_blank[j], shares[j]);
        }
      }
      std::fill(beta + columns, beta + width, minus_infinity<double>);
      behind = first;
    }
    const int64_t corner = -lattice.first_symbol(0);
    return corner >= 0 && corner < width ? beta[corner] : minus_infinity<double>;
  }
};

// Replaces arc shares by occupancies. `scratch` has room for four frames.
template <Topology topology>
struct ForwardFrames {
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const Utterance<real>* utterance, double* scratch) {
    const Utterance<real>& lattice = *utterance;
    const int64_t width = lattice.width;
    // blanks, emits: masses of the arcs to the next frame, by the column of their source.
    double *mass = scratch, *blanks = mass + width, *emits = blanks + width;
    double* shifted = emits + width;
    std::fill(mass, mass + width, 0.0);
    mass[-lattice.first_symbol(0)] = 1;
    for (int64_t t = 0; t < lattice.frames; ++t) {
      const int64_t first = lattice.first_symbol(t), columns = lattice.columns(t);
      real* gx = lattice.gx + lattice.row(t);
      real* gy = lattice.gy + lattice.row(t);
      if (topology == Topology::kRegular) {
        double emit = 0;
        for (int64_t j = 0; j < columns; ++j) {
          const double here = mass[j] + emit;
          const ArcShares share = split_share(gx[j]);
          emit = here * share.emit;
          blanks[j] = here * share.blank;
          gx[j] = static_cast<real>(emit);
          gy[j] = static_cast<real>(blanks[j]);
        }
      } else {
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
          const ArcShares share = split_share(gx[j]);
          emits[j] = mass[j] * share.emit;
          blanks[j] = mass[j] * share.blank;
          gx[j] = static_cast<real>(emits[j]);
          gy[j] = static_cast<real>(blanks[j]);
        }
      }
      if (topology == Topology::kConstrained) {
        for (int64_t j = 1; j < columns; ++j) gy[j] += gx[j - 1];
      }
      std::fill(gx + columns, gx + width, real(0));
      std::fill(gy + columns, gy + width, real(0));
      if (t + 1 == lattice.frames) return;
      const int64_t shift = lattice.first_symbol(t + 1) - first;
      std::fill(blanks + columns, blanks + width, 0.0);
      shift_columns(blanks, width, shift, 0.0, mass);
      if (topology != Topology::kRegular) {
        std::fill(emits + columns, emits + width, 0.0);
        shift_columns(emits, width, shift - 1, 0.0, shifted);
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) mass[j] += shifted[j];
      }
    }
  }
};

}  // namespace pruned_rnnt
