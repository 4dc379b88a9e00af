// One utterance of a band of columns per frame, and the scores of its arcs.
//
// Axes: N utterances, T frames, U symbols, W columns of a frame (j), u = start + j.
#pragma once

#include "cpu/geometry.h"
#include "log_math.h"
#include "topology.h"

namespace pruned_rnnt {

// target[j] = source[j + shift], and -inf where that lies outside 0..width-1.
template <typename real>
PRUNED_RNNT_INLINE void shift_columns(const real* source, int64_t width, int64_t shift,
                                      real* target) {
  const int64_t begin = std::min(width, std::max<int64_t>(-shift, 0));
  const int64_t end = std::max(begin, std::min(width, width - shift));
  std::fill(target, target + begin, minus_infinity<real>);
  std::copy(source + begin + shift, source + end + shift, target + begin);
  std::fill(target + end, target + width, minus_infinity<real>);
}

// One utterance's part of the arrays, with frames as offsets.
template <typename real>
struct Utterance {
  const Geometry& geometry;
  const real* px;
  const real* py;
  real* alpha;
  real* beta;
  int64_t n, frames, symbols, width;
  real delay_penalty;

  int64_t row(int64_t t) const { return t * width; }
  int64_t first_symbol(int64_t t) const { return geometry.first_symbol_of(n, t); }
  // Added to px at frame t.
  real delay(int64_t t) const {
    return delay_penalty == 0 ? real(0) : delay_penalty * (real(frames - 1) / 2 - real(t));
  }
  // Columns of frame t that are symbol positions of this utterance.
  int64_t columns(int64_t t) const {
    return std::max<int64_t>(0, std::min(width, symbols + 1 - first_symbol(t)));
  }
};

// Scores of the emitting arcs of one frame: px + delay, plus the blank above for `constrained`.
template <Topology topology, typename real>
PRUNED_RNNT_INLINE void emission_scores(const Utterance<real>& lattice, int64_t t, real* scores) {
  const real* px = lattice.px + lattice.row(t);
  const real* py = lattice.py + lattice.row(t);
  const real delay = lattice.delay(t);
  const int64_t width = lattice.width;
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) scores[j] = px[j] + delay;
  if (topology == Topology::kConstrained) {
#pragma omp simd
    for (int64_t j = 0; j < width - 1; ++j) scores[j] += py[j + 1];
    scores[width - 1] = minus_infinity<real>;
  }
}

// What lies behind the two arcs of every node of frame t: beta of the node that the blank leads to
// and of the node that the symbol leads to (the latter not for `regular`, whose symbol stays in
// the frame). The end of the lattice counts 0.
template <Topology topology, typename real>
PRUNED_RNNT_INLINE void beta_behind(const Utterance<real>& lattice, int64_t t, real* blank_end,
                                    real* symbol_end) {
  const int64_t width = lattice.width, first = lattice.first_symbol(t);
  if (t == lattice.frames - 1) {
    std::fill(blank_end, blank_end + width, minus_infinity<real>);
    std::fill(symbol_end, symbol_end + width, minus_infinity<real>);
    const int64_t last = lattice.symbols - first;
    if (last >= 0 && last < width) blank_end[last] = 0;
    if (ends_with_symbol(topology) && last >= 1 && last <= width) symbol_end[last - 1] = 0;
    return;
  }
  const real* after = lattice.beta + lattice.row(t + 1);
  const int64_t shift = first - lattice.first_symbol(t + 1);
  shift_columns(after, width, shift, blank_end);
  if (topology != Topology::kRegular) shift_columns(after, width, shift + 1, symbol_end);
}

}  // namespace pruned_rnnt
