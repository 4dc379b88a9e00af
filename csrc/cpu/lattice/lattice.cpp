// lattice: the recursion in k2's layout with a begin and an end per utterance, as a wave over rows
// of symbols (cpu/lattice/wave.h). Contract: pruned_rnnt/ops/lattice/lattice.py.
//
// Axes: N utterances, U symbols, T frames; px and gx (N,U,T+1) or (N,U,T), py and gy (N,U+1,T).
// Frames are contiguous.
#include "contracts/lattice.h"

#include <vector>

#include "cpu/common/parallel.h"
#include "cpu/common/vectorise.h"
#include "cpu/lattice/wave.h"
#include "op.h"
#include "topology.h"

namespace pruned_rnnt {
namespace {

// One utterance: arrays of the whole lattice, and the rectangle of its paths.
template <typename real>
struct Rectangle {
  const real *px, *py;
  real *gx, *gy;
  int64_t U, T, px_frames;
  int64_t u_begin, t_begin, u_end, t_end;

  // Whether there can be a path: the rectangle has a frame and lies inside the lattice.
  bool possible() const {
    return 0 <= u_begin && u_begin <= u_end && u_end <= U && 0 <= t_begin && t_begin < t_end &&
           t_end <= T;
  }

  // Row u from the first frame on. Only `constrained` has a blank in its emit.
  WaveRow<real> row(int64_t u, Topology topology) const {
    const bool emits = u < u_end;
    const bool blank_in_emit = emits && topology == Topology::kConstrained;
    return {emits ? px + u * px_frames + t_begin : nullptr,       py + u * T + t_begin,
            blank_in_emit ? py + (u + 1) * T + t_begin : nullptr, 0.0,
            emits ? gx + u * px_frames + t_begin : nullptr,       gy + u * T + t_begin};
  }

  // Clears all nodes outside the rectangle, or all nodes.
  void clear_outside(int64_t emit_size, bool everything) const {
    const int64_t rows_begin = everything ? U + 1 : u_begin, rows_end = everything ? U + 1 : u_end;
    for (int64_t u = 0; u <= U; ++u) {
      const bool inside = u >= rows_begin && u <= rows_end;
      if (!inside) std::fill(gy + u * T, gy + (u + 1) * T, real(0));
      if (u < U && (!inside || u == rows_end)) {
        std::fill(gx + u * px_frames, gx + (u + 1) * px_frames, real(0));
      }
      if (!inside) continue;
      std::fill(gy + u * T, gy + u * T + t_begin, real(0));
      std::fill(gy + u * T + t_end, gy + (u + 1) * T, real(0));
      if (u == rows_end) continue;
      real* row = gx + u * px_frames;
      std::fill(row, row + t_begin, real(0));
      std::fill(row + t_begin + emit_size, row + px_frames, real(0));
    }
  }
};

// Both walks over one utterance; returns log P.
template <Topology topology, typename real>
real run_utterance(const Rectangle<real>& lattice, WaveScratch<real>* scratch,
                   std::vector<WaveRow<real>>& rows) {
  constexpr int lag = topology == Topology::kRegular ? 1 : 2;
  const int64_t size = lattice.t_end - lattice.t_begin + 1;
  // An `rna` path ends with a blank, so that no symbol leaves the last frame.
  const WaveShape shape{size, topology == Topology::kRna ? 2 : lag - 1, size - (lag - 1), size - 1};
  if (!lattice.possible()) {
    lattice.clear_outside(0, true);
    return minus_infinity<real>;
  }
  rows.clear();
  for (int64_t u = lattice.u_begin; u <= lattice.u_end; ++u) {
    rows.push_back(lattice.row(u, topology));
  }
  const int64_t height = static_cast<int64_t>(rows.size());
  for (int64_t done = 0; done < height; done += kWaveRows) {
    run_vectorised<BackwardWave<false, lag>>(
        &rows[height - 1 - done], std::min(kWaveRows, height - done), &shape, done == 0, scratch);
  }
  const double total = scratch->edge[size - 1];
  const bool has_path = total != minus_infinity<double>;
  lattice.clear_outside(shape.emit_size, !has_path);
  if (!has_path) return minus_infinity<real>;
  for (int64_t done = 0; done < height; done += kWaveRows) {
    run_vectorised<ForwardWave<false, lag>>(&rows[done], std::min(kWaveRows, height - done), &shape,
                                            done == 0, scratch);
  }
  if (topology == Topology::kConstrained) {
    for (int64_t i = 1; i < height; ++i) {
      for (int64_t t = 0; t < shape.emit_size; ++t) rows[i].gy[t] += rows[i - 1].gx[t];
    }
  }
  return static_cast<real>(total);
}

template <typename real>
struct Arrays {
  const real *px, *py;
  real *total, *gx, *gy;
};

template <Topology topology, typename real>
void run_lattices(int64_t N, int64_t U, int64_t T, int64_t px_frames, const int32_t* boundary,
                  const Arrays<real>& arrays) {
  parallel_tasks(N, 1, [&](int64_t begin, int64_t end) {
    WaveScratch<real> scratch(T + 1);
    std::vector<WaveRow<real>> rows;
    for (int64_t n = begin; n < end; ++n) {
      Rectangle<real> lattice{arrays.px + n * U * px_frames,
                              arrays.py + n * (U + 1) * T,
                              arrays.gx + n * U * px_frames,
                              arrays.gy + n * (U + 1) * T,
                              U,
                              T,
                              px_frames,
                              0,
                              0,
                              U,
                              T};
      if (boundary != nullptr) {
        lattice.u_begin = boundary[4 * n];
        lattice.t_begin = boundary[4 * n + 1];
        lattice.u_end = boundary[4 * n + 2];
        lattice.t_end = boundary[4 * n + 3];
      }
      arrays.total[n] = run_utterance<topology>(lattice, &scratch, rows);
    }
  });
}

void lattice(const View& px, const View& py, const OptionalView& boundary, int64_t rnnt_type,
             const View&, const View& total, const View& gx, const View& gy) {
  const int64_t N = py.size(0), U = py.size(1) - 1, T = py.size(2), px_frames = px.size(2);
  dispatch_accumulator(px.scalar_type(), "lattice", [&](auto zero) {
    using real = decltype(zero);
    const Arrays<real> arrays{data_of<real>(px), data_of<real>(py), mutable_data_of<real>(total),
                              mutable_data_of<real>(gx), mutable_data_of<real>(gy)};
    dispatch_topology(rnnt_type, [&](auto topology) {
      run_lattices<decltype(topology)::value>(N, U, T, px_frames, data_or_null<int32_t>(boundary),
                                              arrays);
    });
  });
}

PRUNED_RNNT_CPU_OP(lattice)

}  // namespace
}  // namespace pruned_rnnt
