// band_lattice: the recursion over a band of columns per frame. Contract:
// pruned_rnnt/ops/lattice/lattice.py; layout: row_geometry.h.
//
// Axes: N utterances, T frames, U symbols, W columns of a frame (j), u = start + j.
#include <vector>

#include "contracts/rows.h"
#include "cpu/common/parallel.h"
#include "cpu/common/vectorise.h"
#include "cpu/lattice/band_recursion.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

// Scratch memory of a thread.
template <typename real>
struct Scratch {
  WaveScratch<real> wave;
  std::vector<WaveRow<real>> rows;
  std::vector<double> frames;
};

// A whole `regular` lattice, by waves of frames; returns log P.
template <typename real>
double run_wave(const Utterance<real>& lattice, Scratch<real>& scratch) {
  const int64_t size = lattice.symbols + 1;
  const WaveShape shape{size, 0, size, size};
  scratch.rows.clear();
  for (int64_t t = 0; t < lattice.frames; ++t) {
    const int64_t row = lattice.row(t);
    scratch.rows.push_back({lattice.px + row, lattice.py + row, nullptr, lattice.delay(t),
                            lattice.gx + row, lattice.gy + row});
  }
  for (int64_t done = 0; done < lattice.frames; done += kWaveRows) {
    run_vectorised<BackwardWave<true, 1>>(&scratch.rows[lattice.frames - 1 - done],
                                          std::min(kWaveRows, lattice.frames - done), &shape,
                                          done == 0, &scratch.wave);
  }
  const double total = scratch.wave.edge[size - 1];
  if (total == minus_infinity<double>) return total;
  for (int64_t done = 0; done < lattice.frames; done += kWaveRows) {
    run_vectorised<ForwardWave<true, 1>>(&scratch.rows[done],
                                         std::min(kWaveRows, lattice.frames - done), &shape,
                                         done == 0, &scratch.wave);
  }
  for (int64_t t = 0; t < lattice.frames; ++t) {
    for (real* row : {lattice.gx + lattice.row(t), lattice.gy + lattice.row(t)}) {
      std::fill(row + size, row + lattice.width, real(0));
    }
  }
  return total;
}

// Both walks over one utterance; returns log P. Writes every element of its frames.
template <Topology topology, typename real>
double run_utterance(const Utterance<real>& lattice, Scratch<real>& scratch) {
  double total = minus_infinity<double>;
  if (lattice.frames > 0 && topology == Topology::kRegular && lattice.geometry.start == nullptr) {
    total = run_wave(lattice, scratch);
  } else if (lattice.frames > 0) {
    scratch.frames.resize(4 * lattice.width);
    total = run_vectorised<BackwardFrames<topology>>(&lattice, scratch.frames.data());
    if (total != minus_infinity<double>) {
      run_vectorised<ForwardFrames<topology>>(&lattice, scratch.frames.data());
    }
  }
  const bool has_path = total != minus_infinity<double>;
  const int64_t end = lattice.row(lattice.geometry.stored_frames_of(lattice.n));
  const int64_t empty = has_path ? lattice.row(lattice.frames) : 0;
  // A length below 0 ends before it begins.
  std::fill(lattice.gx + empty, lattice.gx + std::max(end, empty), real(0));
  std::fill(lattice.gy + empty, lattice.gy + std::max(end, empty), real(0));
  return total;
}

template <typename real>
struct Arrays {
  const real *px, *py;
  real *total, *gx, *gy;
};

template <Topology topology, typename real>
void run_lattices(const RowGeometry& geometry, double delay_penalty, const Arrays<real>& arrays) {
  parallel_tasks(geometry.N, 1, [&](int64_t begin, int64_t end) {
    Scratch<real> scratch{WaveScratch<real>(geometry.start == nullptr ? geometry.S : 0), {}, {}};
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = geometry.first_row_of(n);
      const Utterance<real> lattice{geometry,
                                    arrays.px + first,
                                    arrays.py + first,
                                    arrays.gx + first,
                                    arrays.gy + first,
                                    n,
                                    geometry.frames_of(n),
                                    geometry.target_lengths[n],
                                    geometry.width_of(n),
                                    delay_penalty};
      arrays.total[n] = static_cast<real>(run_utterance<topology>(lattice, scratch));
    }
  });
}

void band_lattice(const View& px, const View& py, const LatticeRows& lattice, int64_t rnnt_type,
                  double delay_penalty, const View&, const View& total, const View& gx,
                  const View& gy) {
  const RowGeometry geometry(lattice);
  dispatch_accumulator(px.scalar_type(), "band_lattice", [&](auto zero) {
    using real = decltype(zero);
    const Arrays<real> arrays{data_of<real>(px), data_of<real>(py), mutable_data_of<real>(total),
                              mutable_data_of<real>(gx), mutable_data_of<real>(gy)};
    dispatch_topology(rnnt_type, [&](auto topology) {
      run_lattices<decltype(topology)::value>(geometry, delay_penalty, arrays);
    });
  });
}

PRUNED_RNNT_CPU_OP(band_lattice)

}  // namespace
}  // namespace pruned_rnnt
