// lattice: the forward-backward recursion in k2's layout, with a begin and an end per utterance.
// The recursion and its boundary cases are stated in pruned_rnnt/ops/lattice.py.
//
// Axes: N utterances, U symbols, T frames; px (N,U,T+1) or (N,U,T), py (N,U+1,T), alpha, beta
// (N,U+1,T+1). Frames are contiguous.
#include <vector>

#include "cpu/parallel.h"
#include "cpu/vectorise.h"
#include "cpu/wave.h"
#include "topology.h"

namespace pruned_rnnt {
namespace {

template <typename real>
struct Boxed {
  const real* px;
  const real* py;
  real* alpha;
  real* beta;
  int64_t U, T, px_frames;
  int64_t u_begin, t_begin, u_end, t_end;

  // Whether the box holds a path at all: it has a frame, and lies inside the lattice.
  bool possible() const {
    return 0 <= u_begin && u_begin <= u_end && u_end <= U && 0 <= t_begin && t_begin < t_end &&
           t_end <= T;
  }
  const real* px_row(int64_t u) const { return px + u * px_frames; }
  const real* py_row(int64_t u) const { return py + u * T; }
  real* alpha_row(int64_t u) const { return alpha + u * (T + 1); }
  real* beta_row(int64_t u) const { return beta + u * (T + 1); }
};

// Where the symbol arc out of (u, t) ends: one row up, in the same frame or the next.
constexpr int64_t frame_step(Topology topology) { return topology == Topology::kRegular ? 0 : 1; }

// scores[t] of the symbol arcs that leave row u at frames begin..end-1. An `rna` path ends with a
// blank, so symbol arcs out of the last frame are closed.
template <Topology topology, typename real>
PRUNED_RNNT_INLINE void emission_scores(const Boxed<real>& box, int64_t u, int64_t begin,
                                        int64_t end, real* scores) {
  const real* px = box.px_row(u);
  const real* py_above = box.py_row(u + 1);
#pragma omp simd
  for (int64_t t = begin; t < end; ++t) {
    scores[t] = topology == Topology::kConstrained ? px[t] + py_above[t] : px[t];
  }
  if (topology == Topology::kRna) {
    scores[end - 1] = minus_infinity<real>;
  }
}

// One past the last frame whose symbol arc stays inside the box.
template <Topology topology, typename real>
PRUNED_RNNT_INLINE int64_t emission_end(const Boxed<real>& box) {
  return box.t_end + 1 - frame_step(topology);
}

// Alpha and beta of the other types, row by row: a symbol takes its frame with it.
struct AlphaRows {
  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE real run(const Boxed<real>& box, real* scores) {
    for (int64_t u = 0; u <= box.U; ++u) {
      real* alpha = box.alpha_row(u);
      std::fill(alpha, alpha + box.T + 1, minus_infinity<real>);
      if (u < box.u_begin || u > box.u_end) continue;
      if (u == box.u_begin) {
        alpha[box.t_begin] = 0;
      } else {
        const real* below = box.alpha_row(u - 1);
        emission_scores<topology>(box, u - 1, box.t_begin, box.t_end, scores);
#pragma omp simd
        for (int64_t t = box.t_begin; t < box.t_end; ++t) alpha[t + 1] = below[t] + scores[t];
      }
      const real* py = box.py_row(u);
      for (int64_t t = box.t_begin + 1; t <= box.t_end; ++t) {
        alpha[t] = log_add(alpha[t], alpha[t - 1] + py[t - 1]);
      }
    }
    return box.alpha_row(box.u_end)[box.t_end];
  }
};

struct BetaRows {
  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE void run(const Boxed<real>& box, real* scores) {
    for (int64_t u = box.U; u >= 0; --u) {
      real* beta = box.beta_row(u);
      std::fill(beta, beta + box.T + 1, minus_infinity<real>);
      if (u < box.u_begin || u > box.u_end) continue;
      if (u == box.u_end) {
        beta[box.t_end] = 0;
      } else {
        const real* above = box.beta_row(u + 1);
        emission_scores<topology>(box, u, box.t_begin, box.t_end, scores);
#pragma omp simd
        for (int64_t t = box.t_begin; t < box.t_end; ++t) beta[t] = above[t + 1] + scores[t];
      }
      const real* py = box.py_row(u);
      for (int64_t t = box.t_end - 1; t >= box.t_begin; --t) {
        beta[t] = log_add(beta[t], beta[t + 1] + py[t]);
      }
    }
  }
};

// Alpha (direction 1) or beta (-1) of a `regular` box by waves of rows; returns log P.
template <int64_t direction>
struct RegularRows {
  template <typename real>
  static PRUNED_RNNT_INLINE real run(const Boxed<real>* box, real* scratch) {
    const bool forward = direction > 0;
    real* nodes = forward ? box->alpha : box->beta;
    std::fill(nodes, nodes + (box->U + 1) * (box->T + 1), minus_infinity<real>);
    const int64_t size = box->t_end - box->t_begin + 1, height = box->u_end - box->u_begin + 1;
    const int64_t column = forward ? box->t_begin : box->t_end;
    real* edge = scratch + wave_scratch(size);
    // Before the first row lies the start, as if a symbol of score 0 led from it.
    std::fill(edge, edge + size, minus_infinity<real>);
    edge[0] = 0;
    WaveRow<real> rows[kWaveRows];
    for (int64_t done = 0; done < height; done += kWaveRows) {
      const int64_t count = std::min(kWaveRows, height - done);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t u = forward ? box->u_begin + done + k : box->u_end - done - k;
        // A blank is read where it is left, which is one column before a forward node.
        const real* along = box->py_row(u) + column - (forward ? 1 : 0);
        const real* across = done + k > 0 ? box->px_row(forward ? u - 1 : u) + column : nullptr;
        rows[k] = {along, real(0), across, nodes + u * (box->T + 1) + column};
      }
      LogAddWave::run(rows, count, size, direction, edge, scratch);
    }
    return edge[size - 1];
  }
};

struct OccupancyRow {
  // Writes row u of gx (u < U) and gy. `scores` has room for two rows: a constrained symbol arc
  // counts in gy of the row above too, which therefore computes the arcs from below again.
  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE void run(const Boxed<real>& box, int64_t u, real total, real* scores,
                                     real* gx, real* gy) {
    const bool inside = u >= box.u_begin && u <= box.u_end && total != minus_infinity<real>;
    std::fill(gy, gy + box.T, real(0));
    if (inside) {
      const real *alpha = box.alpha_row(u), *beta = box.beta_row(u), *py = box.py_row(u);
#pragma omp simd
      for (int64_t t = box.t_begin; t < box.t_end; ++t) {
        gy[t] = exp_of(alpha[t] + py[t] + beta[t + 1] - total);
      }
      if (topology == Topology::kConstrained && u > box.u_begin) {
        symbol_arcs<topology>(box, u - 1, total, scores, scores + box.T + 1);
#pragma omp simd
        for (int64_t t = box.t_begin; t < box.t_end; ++t) gy[t] += scores[box.T + 1 + t];
      }
    }
    if (u == box.U) return;
    std::fill(gx, gx + box.px_frames, real(0));
    if (inside && u < box.u_end) symbol_arcs<topology>(box, u, total, scores, gx);
  }

  template <Topology topology, typename real>
  static PRUNED_RNNT_INLINE void symbol_arcs(const Boxed<real>& box, int64_t u, real total,
                                             real* scores, real* gx) {
    const int64_t step = frame_step(topology), end = emission_end<topology>(box);
    const real *alpha = box.alpha_row(u), *above = box.beta_row(u + 1);
    emission_scores<topology>(box, u, box.t_begin, end, scores);
#pragma omp simd
    for (int64_t t = box.t_begin; t < end; ++t) {
      gx[t] = exp_of(alpha[t] + scores[t] + above[t + step] - total);
    }
  }
};

template <typename Loop, Topology topology>
struct WithTopology {
  template <typename real, typename... Arguments>
  static PRUNED_RNNT_INLINE auto run(const Boxed<real>* box, Arguments... arguments) {
    return Loop::template run<topology>(*box, arguments...);
  }
};

template <typename real>
struct Arrays {
  const real *px, *py;
  real *alpha, *beta, *total, *gx, *gy;
};

template <Topology topology, typename real>
void run_lattices(int64_t N, int64_t U, int64_t T, int64_t px_frames, const int32_t* boundary,
                  const Arrays<real>& arrays) {
  const auto box_of = [&](int64_t n) {
    const int64_t nodes = (U + 1) * (T + 1);
    Boxed<real> box{arrays.px + n * U * px_frames,
                    arrays.py + n * (U + 1) * T,
                    arrays.alpha + n * nodes,
                    arrays.beta + n * nodes,
                    U,
                    T,
                    px_frames,
                    0,
                    0,
                    U,
                    T};
    if (boundary != nullptr) {
      box.u_begin = boundary[4 * n];
      box.t_begin = boundary[4 * n + 1];
      box.u_end = boundary[4 * n + 2];
      box.t_end = boundary[4 * n + 3];
    }
    return box;
  };
  parallel_tasks(2 * N, 1, [&](int64_t begin, int64_t end) {
    constexpr bool waves = topology == Topology::kRegular;
    std::vector<real> scores(T + 1 + (waves ? wave_scratch(T + 1) : 0));
    for (int64_t task = begin; task < end; ++task) {
      const Boxed<real> box = box_of(task / 2);
      if (!box.possible()) {
        real* output = task % 2 == 0 ? box.alpha : box.beta;
        std::fill(output, output + (U + 1) * (T + 1), minus_infinity<real>);
        if (task % 2 == 0) arrays.total[task / 2] = minus_infinity<real>;
      } else if (task % 2 == 0) {
        using Alpha = std::conditional_t<waves, RegularRows<1>, WithTopology<AlphaRows, topology>>;
        arrays.total[task / 2] = run_vectorised<Alpha>(&box, scores.data());
      } else {
        using Beta = std::conditional_t<waves, RegularRows<-1>, WithTopology<BetaRows, topology>>;
        run_vectorised<Beta>(&box, scores.data());
      }
    }
  });
  const int64_t grain = std::max<int64_t>(1, 4096 / (T + 1));
  parallel_tasks(N * (U + 1), grain, [&](int64_t begin, int64_t end) {
    std::vector<real> scores(2 * (T + 1));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / (U + 1), u = task % (U + 1);
      const Boxed<real> box = box_of(n);
      run_vectorised<WithTopology<OccupancyRow, topology>>(&box, u, arrays.total[n], scores.data(),
                                                           arrays.gx + (n * U + u) * px_frames,
                                                           arrays.gy + task * T);
    }
  });
}

void lattice(const Tensor& px, const Tensor& py, const OptionalTensor& boundary, int64_t rnnt_type,
             const Tensor& alpha, const Tensor& beta, const Tensor& total, const Tensor& gx,
             const Tensor& gy) {
  const int64_t N = py.size(0), U = py.size(1) - 1, T = py.size(2), px_frames = px.size(2);
  dispatch_accumulator(px.scalar_type(), "lattice", [&](auto zero) {
    using real = decltype(zero);
    const Arrays<real> arrays{data_of<real>(px),
                              data_of<real>(py),
                              mutable_data_of<real>(alpha),
                              mutable_data_of<real>(beta),
                              mutable_data_of<real>(total),
                              mutable_data_of<real>(gx),
                              mutable_data_of<real>(gy)};
    dispatch_topology(rnnt_type, [&](auto topology) {
      run_lattices<decltype(topology)::value>(N, U, T, px_frames, data_or_null<int32_t>(boundary),
                                              arrays);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) { m.impl("lattice", TORCH_BOX(&lattice)); }

}  // namespace pruned_rnnt
