// The recursion of pruned_rnnt/ops/lattice/tdt_lattice.py over the rows of one utterance, frame by
// frame, in logarithms of double:
//
//   beta(t,u) = log_add over the arcs of (score of the arc + beta(its target))
//   mass(t,u) = sum over the arcs to (t,u) of mass(source) * share of the arc
//
//   u+1   .   x     x     x     x        The arcs of a node: symbols of durations 0, 1, 2, ..
//    u    o         x     x     x        and blanks of durations 1, 2, ..  Symbols of duration 0
//         t        t+1   t+2   t+3       are added one column after the other.
//
// Axes: T frames, U symbols, W columns of a frame (j), u = start + j, K durations, A = 2K arcs of a
// node: first the symbols.
#pragma once

#include <vector>

#include "log_math.h"
#include "row_geometry.h"

namespace pruned_rnnt {

// One utterance's part of the arrays.
template <typename real>
struct TdtUtterance {
  const RowGeometry& geometry;
  const std::vector<int64_t>& durations;
  const real *px, *py, *duration_logits;
  real *shares, *gx, *gy, *stay, *gd;
  int64_t n, frames, symbols, width;
  double sigma, delay_penalty;
  bool multi_blank;

  int64_t count() const { return static_cast<int64_t>(durations.size()); }
  int64_t first_symbol(int64_t t) const { return geometry.first_symbol_of(n, t); }
  // Added to px at frame t.
  double symbol_offset(int64_t t) const {
    const double middle = static_cast<double>(frames - 1) / 2;
    return delay_penalty * (middle - static_cast<double>(t)) - sigma;
  }
  // Columns of frame t that are symbol positions of this utterance; none in a frame that begins
  // before the first one, as in no band that has been checked.
  int64_t columns(int64_t t) const {
    const int64_t first = first_symbol(t);
    return first < 0 ? 0 : std::max<int64_t>(0, std::min(width, symbols + 1 - first));
  }
  // Shares of arc a of frame t, for all columns.
  real* share(int64_t t, int64_t a) const { return shares + (2 * count() * t + a) * width; }
};

// Values of the symbol positions 0 .. U+1 in the last frames, as many as the longest duration + 1.
struct FrameRing {
  FrameRing(std::vector<double>& memory, int64_t frames, int64_t symbols, double value)
      : frames(frames), size(symbols + 2) {
    memory.assign(frames * size, value);
    data = memory.data();
  }
  double* at(int64_t t) const { return data + t % frames * size; }

  double* data;
  int64_t frames, size;
};

// Writes the arcs' shares, which sum to 1 but for rounding, and returns log P. `scores` has room
// for (A + 3) frames.
struct TdtBackward {
  template <typename real>
  static PRUNED_RNNT_INLINE double run(const TdtUtterance<real>* utterance, const FrameRing* ring,
                                       double* scores) {
    const TdtUtterance<real>& lattice = *utterance;
    const int64_t width = lattice.width, K = lattice.count();
    double *largest = scores + 2 * K * width, *sum = largest + width, *log_d = sum + width;
    ring->at(lattice.frames)[lattice.symbols] = 0;
    for (int64_t t = lattice.frames - 1; t >= 0; --t) {
      const int64_t first = lattice.first_symbol(t), columns = lattice.columns(t);
      double* beta = ring->at(t);
      // The frame that this one replaces.
      std::fill(beta, beta + ring->size, minus_infinity<double>);
      if (columns <= 0) continue;
      const real* px = lattice.px + t * width;
      const real* py = lattice.py + t * width;
      const real* logits = lattice.duration_logits + t * width * K;
      const double offset = lattice.symbol_offset(t), sigma = lattice.sigma;
      if (lattice.multi_blank) {
        std::fill(log_d, log_d + columns, 0.0);
      } else {
        normalise_durations(logits, columns, K, log_d);
      }
      std::fill(largest, largest + columns, minus_infinity<double>);
      int64_t zero = -1;
      for (int64_t k = 0; k < K; ++k) {
        const int64_t target = t + lattice.durations[k];
        double *symbol = scores + k * width, *blank = scores + (K + k) * width;
        const bool has_symbol = target < lattice.frames && (target == t || !lattice.multi_blank);
        if (!has_symbol) std::fill(symbol, symbol + columns, minus_infinity<double>);
        if (target > lattice.frames || target == t) {
          std::fill(blank, blank + columns, minus_infinity<double>);
        }
        if (target > lattice.frames) continue;
        const double* behind = ring->at(target) + first;
        if (target == t) {
          zero = k;
#pragma omp simd
          for (int64_t j = 0; j < columns; ++j) {
            symbol[j] = px[j] + offset + (logits[j * K + k] - log_d[j]);
          }
          continue;
        }
        if (has_symbol) {
#pragma omp simd
          for (int64_t j = 0; j < columns; ++j) {
            symbol[j] = px[j] + offset + (logits[j * K + k] - log_d[j]) + behind[j + 1];
            largest[j] = symbol[j] > largest[j] ? symbol[j] : largest[j];
          }
        }
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
          blank[j] = py[j] - sigma + (logits[j * K + k] - log_d[j]) + behind[j];
          largest[j] = blank[j] > largest[j] ? blank[j] : largest[j];
        }
      }
      std::fill(sum, sum + columns, 0.0);
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) {
        largest[j] = largest[j] == minus_infinity<double> ? 0 : largest[j];
      }
      for (int64_t a = 0; a < 2 * K; ++a) {
        if (a == zero) continue;
        const double* score = scores + a * width;
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
          sum[j] += exp_of_nonpositive(static_cast<real>(score[j] - largest[j]));
        }
      }
      double above = minus_infinity<double>;
      for (int64_t j = columns - 1; j >= 0; --j) {
        double here = minus_infinity<double>;
        if (!(sum[j] == 0)) here = largest[j] + std::log(sum[j]);
        if (zero >= 0) {
          double& symbol = scores[zero * width + j];
          symbol += above;
          const double high = symbol > here ? symbol : here;
          const double low = symbol > here ? here : symbol;
          if (high != minus_infinity<double>) here = high + std::log1p(std::exp(low - high));
        }
        beta[first + j] = above = here;
      }
      for (int64_t a = 0; a < 2 * K; ++a) {
        const double *score = scores + a * width, *total = beta + first;
        real* share = lattice.share(t, a);
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) {
          const double base = total[j] == minus_infinity<double> ? 0 : total[j];
          share[j] = exp_of_nonpositive(static_cast<real>(score[j] - base));
        }
      }
    }
    const int64_t corner = -lattice.first_symbol(0);
    const bool inside = corner >= 0 && corner < lattice.width;
    return inside ? ring->at(0)[0] : minus_infinity<double>;
  }

  // log_d: the log-sum-exp of each column's logits; +inf if all are -inf.
  template <typename real>
  static PRUNED_RNNT_INLINE void normalise_durations(const real* logits, int64_t columns, int64_t K,
                                                     double* log_d) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      double largest = logits[j * K], sum = 0;
      for (int64_t k = 1; k < K; ++k) {
        largest = logits[j * K + k] > largest ? logits[j * K + k] : largest;
      }
      const bool none = largest == minus_infinity<double>;
      if (none) largest = 0;
      for (int64_t k = 0; k < K; ++k) {
        sum += exp_of_nonpositive(static_cast<double>(logits[j * K + k]) - largest);
      }
      log_d[j] = none ? -minus_infinity<double> : largest + log_of_positive(sum);
    }
  }
};

// Turns shares into occupancies. `scratch` has room for three frames.
struct TdtForward {
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const TdtUtterance<real>* utterance, const FrameRing* ring,
                                     double* scratch) {
    const TdtUtterance<real>& lattice = *utterance;
    const int64_t width = lattice.width, K = lattice.count();
    double *norm = scratch, *symbols = scratch + width, *blanks = scratch + 2 * width;
    ring->at(0)[0] = 1;
    for (int64_t t = 0; t < lattice.frames; ++t) {
      const int64_t first = lattice.first_symbol(t), columns = lattice.columns(t);
      double* mass = ring->at(t) + first;
      real *gx = lattice.gx + t * width, *gy = lattice.gy + t * width;
      real *stay = lattice.stay + t * width, *gd = lattice.gd + t * width * K;
      const int64_t kept = std::max<int64_t>(columns, 0);
      std::fill(gx + kept, gx + width, real(0));
      std::fill(gy + kept, gy + width, real(0));
      std::fill(stay, stay + width, real(0));
      std::fill(gd + kept * K, gd + width * K, real(0));
      if (columns <= 0) continue;
      std::fill(norm, norm + columns, 0.0);
      for (int64_t a = 0; a < 2 * K; ++a) {
        const real* share = lattice.share(t, a);
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) norm[j] += share[j];
      }
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) norm[j] = norm[j] == 0 ? 0 : 1 / norm[j];
      for (int64_t k = 0; k < K; ++k) {
        if (lattice.durations[k] != 0) continue;
        const real* share = lattice.share(t, k);
        double arriving = 0;
        for (int64_t j = 0; j < columns; ++j) {
          mass[j] += arriving;
          arriving = mass[j] * norm[j] * share[j];
          stay[j] = static_cast<real>(arriving);
        }
      }
      std::fill(symbols, symbols + columns, 0.0);
      std::fill(blanks, blanks + columns, 0.0);
      for (int64_t k = 0; k < K; ++k) {
        const int64_t target = t + lattice.durations[k];
        const real *symbol = lattice.share(t, k), *blank = lattice.share(t, K + k);
        const bool moves = target > t && target < lattice.frames;
        double* behind = ring->at(moves ? target : t) + first;
        for (int64_t j = 0; j < columns; ++j) {
          const double node = mass[j] * norm[j];
          const double emitted = node * symbol[j], stayed = node * blank[j];
          symbols[j] += emitted;
          blanks[j] += stayed;
          gd[j * K + k] = static_cast<real>(emitted + stayed);
          if (moves) {
            behind[j + 1] += emitted;
            behind[j] += stayed;
          }
        }
      }
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) {
        gx[j] = static_cast<real>(symbols[j]);
        gy[j] = static_cast<real>(blanks[j]);
      }
      std::fill(mass, mass + columns, 0.0);
    }
  }
};

}  // namespace pruned_rnnt
