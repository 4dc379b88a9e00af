// band_lattice: the forward-backward recursion over a band of columns per frame (a full lattice is
// a band that starts at 0 everywhere). The recursion and its boundary cases are stated in
// pruned_rnnt/ops/band_lattice.py; layout in cpu/geometry.h.
//
// Axes: N utterances, T frames, U symbols, W columns of a frame (j), u = start + j.
#include <vector>

#include "cpu/geometry.h"
#include "cpu/parallel.h"
#include "cpu/topology.h"
#include "cpu/vectorise.h"

namespace pruned_rnnt {
namespace {

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

struct Occupancy {
  // Writes gx and gy of frame t. `scratch` has room for three frames.
  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE void run(const Utterance<real>& lattice, int64_t t, real total,
                                     real* scratch, real* gx, real* gy) {
    const int64_t width = lattice.width;
    real* blank_end = scratch;
    real* symbol_end = scratch + width;
    real* emitted = scratch + 2 * width;
    const real* alpha = lattice.alpha + lattice.row(t);
    const real* beta = lattice.beta + lattice.row(t);
    const real* py = lattice.py + lattice.row(t);
    beta_behind<topology>(lattice, t, blank_end, symbol_end);
    if (topology == Topology::kRegular) shift_columns(beta, width, 1, symbol_end);
    emission_scores<topology>(lattice, t, emitted);
    const int64_t columns = lattice.columns(t);
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) {
      gx[j] = exp_of(alpha[j] + emitted[j] + symbol_end[j] - total);
      gy[j] = exp_of(alpha[j] + py[j] + blank_end[j] - total);
    }
    std::fill(gx + columns, gx + width, real(0));
    std::fill(gy + columns, gy + width, real(0));
    if (topology == Topology::kConstrained) {
      for (int64_t j = 1; j < columns; ++j) gy[j] += gx[j - 1];
    }
  }
};

// The members of each struct above with the topology fixed, as run_vectorised wants them.
template <typename Loop, Topology topology>
struct WithTopology {
  template <typename real, typename... Arguments>
  static PRUNED_RNNT_INLINE auto run(const Utterance<real>* lattice, Arguments... arguments) {
    return Loop::template run<topology>(*lattice, arguments...);
  }
};

template <typename real>
struct Arrays {
  real *alpha, *beta, *total, *gx, *gy;
};

template <Topology topology, typename real>
void run_lattices(const Geometry& geometry, const real* px, const real* py, real delay_penalty,
                  const Arrays<real>& out) {
  const auto utterance = [&](int64_t n) {
    const int64_t first = geometry.first_row_of(n);
    return Utterance<real>{geometry,
                           px + first,
                           py + first,
                           out.alpha + first,
                           out.beta + first,
                           n,
                           geometry.frames_of(n),
                           geometry.symbols_of(n),
                           geometry.width_of(n),
                           delay_penalty};
  };
  // Alpha and beta of an utterance do not need each other.
  parallel_tasks(2 * geometry.N, 1, [&](int64_t begin, int64_t end) {
    std::vector<real> scratch;
    for (int64_t task = begin; task < end; ++task) {
      const Utterance<real> lattice = utterance(task / 2);
      if (lattice.frames <= 0) {
        out.total[lattice.n] = minus_infinity<real>;
        continue;
      }
      scratch.resize(3 * lattice.width);
      if (task % 2 == 0) {
        out.total[lattice.n] =
            run_vectorised<WithTopology<AlphaRecursion, topology>>(&lattice, scratch.data());
      } else {
        run_vectorised<WithTopology<BetaRecursion, topology>>(&lattice, scratch.data());
      }
    }
  });
  // Frames of all utterances, those behind an utterance's end too: every element is written.
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(geometry.S, 1));
  parallel_tasks(geometry.N * geometry.T, grain, [&](int64_t begin, int64_t end) {
    std::vector<real> scratch(3 * geometry.S);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / geometry.T, t = task % geometry.T;
      if (t >= geometry.stored_frames_of(n)) continue;
      const Utterance<real> lattice = utterance(n);
      const int64_t offset = geometry.row_of(n, t), width = lattice.width;
      const bool inside = t < lattice.frames;
      if (!inside) {
        std::fill(out.alpha + offset, out.alpha + offset + width, minus_infinity<real>);
        std::fill(out.beta + offset, out.beta + offset + width, minus_infinity<real>);
      }
      if (!inside || out.total[n] == minus_infinity<real>) {
        std::fill(out.gx + offset, out.gx + offset + width, real(0));
        std::fill(out.gy + offset, out.gy + offset + width, real(0));
        continue;
      }
      run_vectorised<WithTopology<Occupancy, topology>>(&lattice, t, out.total[n], scratch.data(),
                                                        out.gx + offset, out.gy + offset);
    }
  });
}

void band_lattice(const Tensor& px, const Tensor& py, const Tensor& logit_lengths,
                  const Tensor& target_lengths, const OptionalTensor& start,
                  const OptionalTensor& row_splits, int64_t T, int64_t S, int64_t rnnt_type,
                  double delay_penalty, const Tensor& alpha, const Tensor& beta,
                  const Tensor& total, const Tensor& gx, const Tensor& gy) {
  const Geometry geometry(logit_lengths, target_lengths, start, row_splits, T, S);
  dispatch_accumulator(px.scalar_type(), "band_lattice", [&](auto zero) {
    using real = decltype(zero);
    const Arrays<real> out{mutable_data_of<real>(alpha), mutable_data_of<real>(beta),
                           mutable_data_of<real>(total), mutable_data_of<real>(gx),
                           mutable_data_of<real>(gy)};
    dispatch_topology(rnnt_type, [&](auto topology) {
      run_lattices<decltype(topology)::value>(geometry, data_of<real>(px), data_of<real>(py),
                                              static_cast<real>(delay_penalty), out);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) { m.impl("band_lattice", TORCH_BOX(&band_lattice)); }

}  // namespace pruned_rnnt
