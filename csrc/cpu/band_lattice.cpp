// band_lattice: the forward-backward recursion over a band of columns per frame (a full lattice is
// a band that starts at 0 everywhere). The recursion and its boundary cases are stated in
// pruned_rnnt/ops/band_lattice.py; layout in cpu/geometry.h.
//
// Axes: N utterances, T frames, U symbols, W columns of a frame (j), u = start + j.
#include <vector>

#include "cpu/band_recursion.h"
#include "cpu/parallel.h"
#include "cpu/vectorise.h"

namespace pruned_rnnt {
namespace {

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
      const bool waves = topology == Topology::kRegular && geometry.start == nullptr;
      scratch.resize(waves ? wave_scratch(lattice.width) + lattice.width : 3 * lattice.width);
      if (waves && task % 2 == 0) {
        out.total[lattice.n] = run_vectorised<FullRegularAlpha>(&lattice, scratch.data());
      } else if (waves) {
        run_vectorised<FullRegularBeta>(&lattice, scratch.data());
      } else if (task % 2 == 0) {
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
