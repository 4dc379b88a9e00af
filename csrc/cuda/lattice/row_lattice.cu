// Whole lattices and wide bands stored as rows, as a wave (lattice_wave.cuh); a part of
// band_lattice.
//
// Axes: N utterances, T frames, W columns of a frame: U+1, or S in a band.
#include "cuda/lattice/lattice_wave.cuh"
#include "cuda/lattice/row_lattice.cuh"

namespace pruned_rnnt::cuda {
namespace {

// Whether the last node is in the band or behind it, and near enough for a path to climb to it.
// Otherwise, lengths and bands of any numbers could make a wave very long.
__device__ bool reaches_end(const int32_t* start, int32_t frames, int64_t columns,
                            int32_t symbols) {
  const int64_t last = int64_t(symbols) - start[frames - 1];
  return last >= 0 && last <= columns && symbols <= frames * columns;
}

// Nodes at the cut that the walks do not visit, because the band has columns for more symbols.
template <typename real>
__device__ void clear_cut(const CutMemory<real>& cut, int32_t start, int32_t columns,
                          int32_t symbols, bool early) {
  for (int32_t j = threadIdx.x; j < columns; j += blockDim.x) {
    const int32_t u = start + j;
    if (u < 0 || u > symbols) cut.save(early, j, Probability<real>::zero());
  }
}

// The sums of a half (blockIdx.y) of each utterance, then its masses.
template <typename real, Topology topology, Layout layout, int team_warps, bool sums>
__global__ void __launch_bounds__(kWaveThreads<real, team_warps>)
    row_lattice_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                       LatticeArrays<real> arrays) {
  constexpr bool is_band = layout == Layout::kBand;
  const int32_t n = blockIdx.x;
  const bool early = blockIdx.y == 1;
  const int64_t first = geometry.first_row_of(n), width = geometry.width_of(n);
  const int32_t symbols = geometry.target_lengths[n], stored = geometry.frames_of(n);
  const int32_t* const start = is_band ? geometry.start + int64_t(n) * geometry.T : nullptr;
  int32_t frames = stored;
  if (is_band && frames > 0 && !reaches_end(start, frames, width, symbols)) frames = 0;
  // T of packed rows may be their number, far above the frames of all utterances.
  const bool by_rows = geometry.row_splits != nullptr && rows < int64_t(geometry.N) * geometry.T;
  const EdgePlace place =
      by_rows ? EdgePlace{first, stored} : EdgePlace{int64_t(n) * geometry.T, geometry.T};
  const CutMemory<real> cut(arrays.work, geometry.N, geometry.S, n, place);
  double log_p = minus_infinity<double>();
  if (!sums && frames > 0) log_p = log_total(cut, is_band ? width : symbols + 1);
  if (frames > 0 && (sums || log_p != minus_infinity<double>())) {
    if (is_band && sums) clear_cut(cut, start[cut_of(frames)], width, symbols, early);
    const WaveLattice<real> lattice{{arrays.px + first, width, 1},
                                    {arrays.py + first, width, 1},
                                    {arrays.gx + first, width, 1},
                                    {arrays.gy + first, width, 1},
                                    frames,
                                    symbols,
                                    topology == Topology::kRna ? frames - 1 : frames,
                                    frames,
                                    delay_penalty,
                                    static_cast<real>(frames - 1) / 2,
                                    start,
                                    int32_t(width)};
    walk_half<real, topology, layout, team_warps, sums>(lattice, early, cut, log_p);
  }
  if (sums) return;
  if (!early && threadIdx.x == 0) arrays.total[n] = static_cast<real>(log_p);
  clear_rows(geometry, arrays, n, log_p == minus_infinity<double>(), RowRange::half(stored, early),
             rows, symbols, start);
}

template <typename real, Topology topology, Layout layout, int team_warps>
void launch_halves(const Launcher& launch, const WaveBlock<real>& block,
                   const RowGeometry& geometry, int64_t rows, real delay_penalty,
                   const LatticeArrays<real>& arrays) {
  const dim3 halves(geometry.N, 2);
  launch(row_lattice_kernel<real, topology, layout, team_warps, true>, halves, block.threads,
         block.shared_bytes, geometry, rows, delay_penalty, arrays);
  launch(row_lattice_kernel<real, topology, layout, team_warps, false>, halves, block.threads,
         block.shared_bytes, geometry, rows, delay_penalty, arrays);
}

// The columns of a band are not known here; with so many a pass, each team has three warps.
constexpr int64_t kBandColumns = kMostTeamsOfThree * kStripe;

}  // namespace

template <typename real>
void row_lattice(const Launcher& launch, const RowGeometry& geometry, int64_t rows,
                 int64_t rnnt_type, real delay_penalty, const LatticeArrays<real>& arrays) {
  dispatch_topology(rnnt_type, [&](auto topology_constant) {
    constexpr Topology topology = decltype(topology_constant)::value;
    if (geometry.start != nullptr) {
      const auto block = wave_block<real, Layout::kBand>(kBandColumns, launch.shared_bytes());
      constexpr int team_warps = sizeof(real) == 4 ? 3 : 2;
      launch_halves<real, topology, Layout::kBand, team_warps>(launch, block, geometry, rows,
                                                               delay_penalty, arrays);
      return;
    }
    const auto block = wave_block<real, Layout::kRows>(geometry.S, launch.shared_bytes());
    block.dispatch([&](auto team_warps) {
      launch_halves<real, topology, Layout::kRows, decltype(team_warps)::value>(
          launch, block, geometry, rows, delay_penalty, arrays);
    });
  });
}

template void row_lattice(const Launcher&, const RowGeometry&, int64_t, int64_t, float,
                          const LatticeArrays<float>&);
template void row_lattice(const Launcher&, const RowGeometry&, int64_t, int64_t, double,
                          const LatticeArrays<double>&);

}  // namespace pruned_rnnt::cuda
