// The lattice of one utterance for tdt_lattice, and the work on its nodes that does not wait for
// other nodes: a whole grid does it before, between and after the walks (tdt_walk.cuh), whose steps
// wait for each other.
//
// Each node has K + 3 pairs of numbers:
//     0 .. K+1   weights exp(score) of the symbol, the blank and each duration, then
//     0 .. K-1   shares of the symbol and the blank of each duration
//     K          what the shares' sum lacks to 1; the node's mass, divided by that sum
//     K+2        beta
// Pair i of neighbouring nodes of a step are neighbours in memory: nodes of an anti-diagonal where
// the walk goes along them over whole frames, else nodes of a frame.
//
// Axes: T frames, U symbols, K durations.
#pragma once

#include "cuda/common/vector_access.cuh"
#include "cuda/lattice/tdt_sums.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {

constexpr int kMostDurations = 16;

struct DurationTable {
  int32_t count, longest;
  bool has_zero;
  int32_t of[kMostDurations];
  int32_t symbol_count;  // symbols take this many durations, the first

  // Frames of the ring.
  __host__ __device__ int32_t ring_frames() const { return longest + 2; }
  // Steps by which a column's frame is behind that of the column before.
  __host__ __device__ int32_t lag() const { return has_zero ? 1 : 0; }
};

struct TdtNode {
  int32_t t, u;
};

template <typename real>
struct TdtLattice {
  using Pair = Vector<real, 2>;

  const real *px, *py, *duration_logits;  // of its first row
  const int32_t* start;                   // of its first frame; null: 0
  Pair* pairs;
  real *gx, *gy, *stay, *gd;
  int32_t frames, symbols, width, durations, lag;
  bool normalised;  // duration logits are log-probabilities
  real sigma, delay_penalty;

  // -1 outside the band.
  RNNT_DEVICE int64_t row(int32_t t, int32_t u) const {
    const int32_t column = start == nullptr ? u : u - start[t];
    return column >= 0 && column < width ? int64_t(t) * width + column : -1;
  }
  // Added to px at frame t.
  RNNT_DEVICE real symbol_offset(int32_t t) const {
    const real middle = static_cast<real>(frames - 1) / 2;
    return delay_penalty * (middle - static_cast<real>(t)) - sigma;
  }

  // The line of memory in which step t + lag * u has its pairs; bands have one for each frame.
  RNNT_DEVICE int32_t line_of(int32_t t, int32_t u) const {
    return start == nullptr ? (t + lag * u) % frames : t;
  }
  // The node at a column of a line; t and u are outside the lattice for columns without nodes.
  RNNT_DEVICE TdtNode node_at(int32_t line, int32_t column) const {
    if (start != nullptr) return {line, start[line] + column};
    const int32_t t = (line - lag * column) % frames;
    return {t < 0 ? t + frames : t, column};
  }
  // Pair 0 of a node, null outside the band; the others follow `width` pairs apart. The line is
  // not used for a band.
  RNNT_DEVICE Pair* pairs_of(int32_t t, int32_t u, int32_t line) const {
    const int32_t column = start == nullptr ? u : u - start[t];
    if (column < 0 || column >= width) return nullptr;
    const int32_t stored = start == nullptr ? line : t;
    return pairs + int64_t(stored) * (durations + 3) * width + column;
  }
};

// The weights of the arcs of a node.
template <typename real, int most>
struct TdtWeights {
  Probability<real> symbol, blank, chosen[most];

  // pairs: number i is i * distance behind. has_all: those of durations from K on may be read, too,
  // which is faster than not to.
  template <bool has_all, typename Distance>
  RNNT_DEVICE static TdtWeights load(const Vector<real, 2>* pairs, Distance distance, int32_t K) {
    TdtWeights weights;
    const auto number = [&](int i) {
      const auto pair = load_vector<2>(pairs[i * distance].x);
      return Probability<real>::load(&pair.x[0], &pair.x[1]);
    };
    weights.symbol = number(0);
    weights.blank = number(1);
#pragma unroll
    for (int n = 0; n < most; ++n) {
      weights.chosen[n] = has_all || n < K ? number(2 + n) : Probability<real>::zero();
    }
    return weights;
  }
};

// arrive[2 n] and [2 n + 1] of the symbol and the blank of each duration, whose targets have beta
// above[n] and beside[n], anything where there is no such node. Without branches, so that nothing
// waits but for what it needs.
template <typename real, int most>
RNNT_DEVICE void arrivals(const TdtLattice<real>& lattice, const DurationTable& table, TdtNode node,
                          const TdtWeights<real, most>& weights,
                          const Probability<real> (&above)[most],
                          const Probability<real> (&beside)[most],
                          Probability<real> (&arrive)[2 * most]) {
  const bool last = node.u == lattice.symbols;
  const int32_t symbol_count = last ? 0 : table.symbol_count;
#pragma unroll
  for (int n = 0; n < most; ++n) {
    const int32_t duration = table.of[n], target = node.t + duration;
    const bool exists = n < table.count, inside = exists && target < lattice.frames;
    const auto zero = Probability<real>::zero();
    const auto to_symbol = weights.symbol * weights.chosen[n] * above[n];
    const auto to_end = weights.blank * weights.chosen[n];
    const auto to_blank = to_end * beside[n];
    const bool ends = exists && target == lattice.frames && last;
    arrive[2 * n] = inside && n < symbol_count ? to_symbol : zero;
    arrive[2 * n + 1] = inside && duration > 0 ? to_blank : (ends ? to_end : zero);
  }
}

// Log-probabilities of the durations from their logits.
template <typename real, int most>
RNNT_DEVICE void normalise_durations(real (&logits)[most]) {
  real largest = minus_infinity<real>(), sum = 0;
#pragma unroll
  for (int n = 0; n < most; ++n) largest = fmax(largest, logits[n]);
  const bool none = largest == minus_infinity<real>();
#pragma unroll
  for (int n = 0; n < most; ++n) sum += exp_of(logits[n] - (none ? real(0) : largest));
  const real normaliser = none ? real(0) : largest + log_of(sum);
#pragma unroll
  for (int n = 0; n < most; ++n) logits[n] -= normaliser;
}

template <typename real, int most>
RNNT_DEVICE void write_weights(const TdtLattice<real>& lattice, TdtNode node,
                               Vector<real, 2>* pairs) {
  using Number = Probability<real>;
  const int64_t row = lattice.row(node.t, node.u);
  const int32_t K = lattice.durations;
  real logits[most];
#pragma unroll
  for (int n = 0; n < most; ++n) {
    logits[n] = n < K ? lattice.duration_logits[row * K + n] : minus_infinity<real>();
  }
  if (!lattice.normalised) normalise_durations(logits);
  const auto store = [&](int i, real score) {
    Vector<real, 2> pair{};
    Number::exp(to_log_zero(score)).save(&pair.x[0], &pair.x[1]);
    store_vector<2>(pairs[int64_t(i) * lattice.width].x, pair);
  };
  store(0, lattice.px[row] + lattice.symbol_offset(node.t));
  store(1, lattice.py[row] - lattice.sigma);
#pragma unroll
  for (int n = 0; n < most; ++n) {
    if (n < K) store(2 + n, logits[n]);
  }
}

// Replaces the weights by the shares; needs beta of all nodes.
template <typename real, int most>
RNNT_DEVICE void write_shares(const TdtLattice<real>& lattice, const DurationTable& table,
                              TdtNode node, Vector<real, 2>* pairs) {
  using Number = Probability<real>;
  const int32_t K = lattice.durations;
  const auto beta = [&](int32_t t, int32_t u) {
    if (t >= lattice.frames || u > lattice.symbols) return Number::zero();
    const auto* const target = lattice.pairs_of(t, u, lattice.line_of(t, u));
    if (target == nullptr) return Number::zero();
    const auto pair = load_vector<2>(target[int64_t(K + 2) * lattice.width].x);
    return Number::load(&pair.x[0], &pair.x[1]);
  };
  const auto weights = TdtWeights<real, most>::template load<false>(pairs, lattice.width, K);
  Number above[most], beside[most], arrive[2 * most];
#pragma unroll
  for (int n = 0; n < most; ++n) {
    above[n] = beside[n] = Number::zero();
    if (n >= K) continue;
    const int32_t target = node.t + table.of[n];
    above[n] = beta(target, node.u + 1);
    if (table.of[n] > 0) beside[n] = beta(target, node.u);
  }
  arrivals(lattice, table, node, weights, above, beside, arrive);
  real shares[2 * most];
  shares_of(arrive, shares);
  double sum = 0;
#pragma unroll
  for (int n = 0; n < most; ++n) {
    if (n >= K) continue;
    const Vector<real, 2> pair{{shares[2 * n], shares[2 * n + 1]}};
    store_vector<2>(pairs[int64_t(n) * lattice.width].x, pair);
    sum += static_cast<double>(pair.x[0]) + static_cast<double>(pair.x[1]);
  }
  const real lacking = sum == 0 ? real(0) : static_cast<real>(1 / sum - 1);
  store_vector<2>(pairs[int64_t(K) * lattice.width].x, Vector<real, 2>{{lacking, real(0)}});
}

// Writes the occupancies of a row; pairs: null for no node.
template <typename real>
RNNT_DEVICE void write_occupancies(const TdtLattice<real>& lattice, const DurationTable& table,
                                   const Vector<real, 2>* pairs, int64_t row) {
  const int32_t K = table.count;
  const double mass =
      pairs == nullptr ? 0 : static_cast<double>(pairs[int64_t(K) * lattice.width].x[1]);
  double symbols = 0, blanks = 0, stay = 0;
  for (int32_t n = 0; n < K; ++n) {
    double symbol = 0, blank = 0;
    if (pairs != nullptr) {
      const auto shares = load_vector<2>(pairs[int64_t(n) * lattice.width].x);
      symbol = mass * static_cast<double>(shares.x[0]);
      blank = mass * static_cast<double>(shares.x[1]);
    }
    symbols += symbol;
    blanks += blank;
    lattice.gd[row * K + n] = static_cast<real>(symbol + blank);
    if (table.of[n] == 0) stay = symbol;
  }
  lattice.gx[row] = static_cast<real>(symbols);
  lattice.gy[row] = static_cast<real>(blanks);
  lattice.stay[row] = static_cast<real>(stay);
}

}  // namespace pruned_rnnt::cuda
