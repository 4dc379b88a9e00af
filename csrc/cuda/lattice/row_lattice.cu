// Whole lattices stored as rows, as a wave (lattice_wave.cuh); a part of band_lattice.
//
// Axes: N utterances, T frames, W = U+1 columns of a frame.
#include "cuda/lattice/lattice_wave.cuh"
#include "cuda/lattice/row_lattice.cuh"

namespace pruned_rnnt::cuda {
namespace {

// The sums of a half (blockIdx.y) of each utterance, then its masses.
template <typename real, Topology topology, int team_warps, bool sums>
__global__ void __launch_bounds__(kWaveThreads<real, team_warps>)
    row_lattice_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                       LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const bool early = blockIdx.y == 1;
  const int64_t first = geometry.first_row_of(n), width = geometry.width_of(n);
  const int32_t frames = geometry.frames_of(n), symbols = geometry.target_lengths[n];
  const CutMemory<real> cut(arrays.work, n, geometry.S, geometry.T);
  double log_p = minus_infinity<double>();
  if (!sums && frames > 0) log_p = log_total(cut, symbols + 1);
  if (frames > 0 && (sums || log_p != minus_infinity<double>())) {
    const WaveLattice<real> lattice{{arrays.px + first, width, 1},
                                    {arrays.py + first, width, 1},
                                    {arrays.gx + first, width, 1},
                                    {arrays.gy + first, width, 1},
                                    frames,
                                    symbols,
                                    topology == Topology::kRna ? frames - 1 : frames,
                                    frames,
                                    delay_penalty,
                                    static_cast<real>(frames - 1) / 2};
    walk_half<real, topology, false, team_warps, sums>(lattice, early, cut, log_p);
  }
  if (sums) return;
  if (!early && threadIdx.x == 0) arrays.total[n] = static_cast<real>(log_p);
  clear_rows(geometry, arrays, n, log_p == minus_infinity<double>(), RowRange::half(frames, early),
             rows, symbols + 1);
}

template <typename real>
void launch_all(const Launcher& launch, const RowGeometry& geometry, int64_t rows,
                int64_t rnnt_type, real delay_penalty, const LatticeArrays<real>& arrays) {
  const dim3 halves(geometry.N, 2);
  const WaveBlock<real> block = wave_block<real, false>(geometry.S, launch.shared_bytes());
  dispatch_topology(rnnt_type, [&](auto topology_constant) {
    constexpr Topology topology = decltype(topology_constant)::value;
    block.dispatch([&](auto team_warps) {
      constexpr int warps = decltype(team_warps)::value;
      launch(row_lattice_kernel<real, topology, warps, true>, halves, block.threads,
             block.shared_bytes, geometry, rows, delay_penalty, arrays);
      launch(row_lattice_kernel<real, topology, warps, false>, halves, block.threads,
             block.shared_bytes, geometry, rows, delay_penalty, arrays);
    });
  });
}

}  // namespace

void row_lattice(const Launcher& launch, const RowGeometry& geometry, int64_t rows,
                 int64_t rnnt_type, float delay_penalty, const LatticeArrays<float>& arrays) {
  launch_all(launch, geometry, rows, rnnt_type, delay_penalty, arrays);
}
void row_lattice(const Launcher& launch, const RowGeometry& geometry, int64_t rows,
                 int64_t rnnt_type, double delay_penalty, const LatticeArrays<double>& arrays) {
  launch_all(launch, geometry, rows, rnnt_type, delay_penalty, arrays);
}

}  // namespace pruned_rnnt::cuda
