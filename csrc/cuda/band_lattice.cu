// band_lattice: the forward-backward recursion over lattices kept as rows. A narrow band is one
// launch, a block for each utterance (band_segments.cuh, band_wave.cuh); wider bands take a block
// for each direction (band_walk.cuh), whole lattices too (lattice_wave.cuh). Bands that move back,
// or are wider than a block, are rare and slower (band_diagonals.cuh). Contract:
// pruned_rnnt/ops/band_lattice.py.
//
// Axes: N utterances, T frames, S columns of a frame, R rows.
#include "cuda/band_diagonals.cuh"
#include "cuda/band_segments.cuh"
#include "cuda/band_walk.cuh"
#include "cuda/band_wave.cuh"
#include "cuda/lattice_wave.cuh"
#include "cuda/occupancy.cuh"
#include "cuda/ops.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

constexpr int kBandThreads = 2 * kDirectionThreads;
// Bands up to these widths go by segments; the usual one is narrower and needs fewer registers.
constexpr int kUsualColumns = 5, kSegmentColumns = 8;

template <typename real>
__device__ BandLattice<real> band_of(const RowGeometry& geometry, const LatticeArrays<real>& arrays,
                                     int32_t n, bool backward, real delay_penalty) {
  const int64_t first = geometry.first_row_of(n);
  return {arrays.px + first,
          arrays.py + first,
          geometry.start + static_cast<int64_t>(n) * geometry.T,
          (backward ? arrays.beta : arrays.alpha) + first,
          geometry.frames_of(n),
          geometry.target_lengths[n],
          geometry.S,
          delay_penalty};
}

// How the bands of up to `most` columns are walked: by segments, or if it is 0 as a wave.
template <typename real, int most>
struct NarrowMemory {
  using type = SegmentMemory<real, most>;
};
template <typename real>
struct NarrowMemory<real, 0> {
  using type = BandMemory<real>;
};

// A block for each utterance: half of the warps go forward, half backward, then all threads turn
// alpha and beta into occupancies.
template <typename real, Topology topology, int most>
__global__ void __launch_bounds__(kBandThreads)
    narrow_band_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                       LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const int warp = threadIdx.x / 32;
  const int32_t frames = geometry.frames_of(n), S = geometry.S;
  const int32_t* start = geometry.start + static_cast<int64_t>(n) * geometry.T;
  __shared__ real shared_total;
  if (threadIdx.x == 0) shared_total = minus_infinity<real>();
  // Has a barrier.
  const bool decreases = start_decreases(start, frames);
  // The directions take turns, so that the warps that walk alone have an arithmetic unit each.
  const bool backward = warp % 2 == 1;
  BandLattice<real> band = band_of(geometry, arrays, n, backward, delay_penalty);
  if (frames > 0 && decreases) {
    const int32_t last_symbol = last_symbol_of(band);
    const int thread = warp / 2 * 32 + threadIdx.x % 32;
    if (backward) {
      const DiagonalWalk<real, topology, true> walk(band);
      const real corner = walk.run(thread, kBandThreads / 2, last_symbol);
      if (thread == 0) shared_total = from_log_zero(corner);
    } else {
      const DiagonalWalk<real, topology, false> walk(band);
      walk.run(thread, kBandThreads / 2, last_symbol);
    }
  } else if (frames > 0) {
    auto* const memory = dynamic_shared_memory<typename NarrowMemory<real, most>::type>();
    // Steps go as far as the symbols. More than the band comes near make no path, however many.
    band.symbols = min(band.symbols, start[frames - 1] + S + 1);
    if constexpr (most > 0) {
      const int thread = warp / 2 * 32 + threadIdx.x % 32;
      if (backward) {
        SegmentWalker<real, topology, true, most>(band).run(memory[1], thread, &shared_total);
      } else {
        SegmentWalker<real, topology, false, most>(band).run(memory[0], thread, nullptr);
      }
    } else if (backward) {
      walk_band_wave<real, topology, true>(band, memory[1], warp / 2, &shared_total);
    } else {
      walk_band_wave<real, topology, false>(band, memory[0], warp / 2, nullptr);
    }
  }
  __syncthreads();
  const real total = shared_total;
  if (threadIdx.x == 0) arrays.total[n] = total;
  const int64_t first = geometry.first_row_of(n);
  int64_t count = geometry.utterance_rows;
  if (geometry.row_splits != nullptr) count = min(rows, geometry.row_splits[n + 1]) - first;
  for (int64_t i = threadIdx.x; i < count; i += kBandThreads) {
    const int32_t t = geometry.by_columns.divide(static_cast<uint32_t>(i));
    const int32_t column = static_cast<int32_t>(i) - t * S;
    const bool inside = t < frames;
    BandNode node{t, -1, column, S, 0, frames, geometry.target_lengths[n]};
    if (inside) node.u = start[t] + column;
    if (t + 1 < frames) node.shift = start[t] - start[t + 1];
    write_occupancy<topology>(arrays, first + i, node, total, delay_penalty);
  }
}

constexpr int kWidestBlock = 1024;
// Less than the columns for which any device has room in shared memory.
constexpr int kFewThreads = 256;

// A block for each direction of each utterance, with a thread for each column if there can be.
template <typename real, Topology topology>
__global__ void __launch_bounds__(kWidestBlock)
    wide_band_kernel(RowGeometry geometry, real delay_penalty, LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const bool backward = blockIdx.y == 1;
  const BandLattice<real> band = band_of(geometry, arrays, n, backward, delay_penalty);
  if (backward && threadIdx.x == 0) arrays.total[n] = minus_infinity<real>();
  if (band.frames <= 0) return;
  if (band.columns > static_cast<int32_t>(blockDim.x) || start_decreases(band.start, band.frames)) {
    const int32_t last_symbol = last_symbol_of(band);
    if (backward) {
      const DiagonalWalk<real, topology, true> walk(band);
      const real corner = walk.run(threadIdx.x, blockDim.x, last_symbol);
      if (threadIdx.x == 0) arrays.total[n] = from_log_zero(corner);
    } else {
      const DiagonalWalk<real, topology, false> walk(band);
      walk.run(threadIdx.x, blockDim.x, last_symbol);
    }
  } else if (backward) {
    const real corner = walk_wide_band<real, topology, true>(band);
    if (corner != kLogZero<real>) arrays.total[n] = from_log_zero(corner);
  } else {
    walk_wide_band<real, topology, false>(band);
  }
}

// A block for each direction of each utterance, over the whole lattice.
template <typename real, Topology topology, int team_warps>
__global__ void __launch_bounds__(kWaveThreads<real, team_warps>)
    full_lattice_kernel(RowGeometry geometry, real delay_penalty, LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const bool backward = blockIdx.y == 1;
  const int64_t first = geometry.first_row_of(n), width = geometry.width_of(n);
  const int32_t frames = geometry.frames_of(n);
  const WaveLattice<real> lattice{{arrays.px + first, width, 1},
                                  {arrays.py + first, width, 1},
                                  {(backward ? arrays.beta : arrays.alpha) + first, width, 1},
                                  // The occupancies are not there yet: their place holds the edges.
                                  (backward ? arrays.gy : arrays.gx) + first,
                                  frames,
                                  geometry.target_lengths[n],
                                  topology == Topology::kRna ? frames - 1 : frames,
                                  frames,
                                  delay_penalty,
                                  static_cast<real>(frames - 1) / 2};
  if (backward) {
    walk_lattice<real, topology, false, true, team_warps>(lattice, arrays.total + n);
  } else {
    walk_lattice<real, topology, false, false, team_warps>(lattice, arrays.total + n);
  }
}

template <typename real, Topology topology>
void run(const Launcher& launch, const RowGeometry& geometry, int64_t rows, real delay_penalty,
         const LatticeArrays<real>& arrays) {
  const uint32_t N = geometry.N;
  if (geometry.start != nullptr && geometry.S <= kNarrowColumns) {
    const auto walk = [&](auto most) {
      constexpr int columns = decltype(most)::value;
      launch(narrow_band_kernel<real, topology, columns>, N, kBandThreads,
             2 * sizeof(typename NarrowMemory<real, columns>::type), geometry, rows, delay_penalty,
             arrays);
    };
    if (geometry.S <= kUsualColumns) {
      walk(std::integral_constant<int, kUsualColumns>());
    } else if (geometry.S <= kSegmentColumns) {
      walk(std::integral_constant<int, kSegmentColumns>());
    } else {
      walk(std::integral_constant<int, 0>());
    }
    return;
  }
  const DeviceLimits limits = launch.limits();
  if (geometry.start != nullptr) {
    int64_t threads = (geometry.S + 31) / 32 * 32;
    size_t bytes = threads * kBandBytes<real>;
    if (threads > kWidestBlock || bytes > static_cast<size_t>(limits.shared_bytes)) {
      // Fewer threads than columns: the kernel goes by diagonals.
      threads = kFewThreads;
      bytes = 0;
    }
    launch(wide_band_kernel<real, topology>, dim3(N, 2), static_cast<uint32_t>(threads), bytes,
           geometry, delay_penalty, arrays);
  } else {
    const WaveBlock<real> block = wave_block<real, false>(geometry.S, limits);
    block.dispatch([&](auto team_warps) {
      launch(full_lattice_kernel<real, topology, decltype(team_warps)::value>, dim3(N, 2),
             block.threads, block.shared_bytes, geometry, delay_penalty, arrays);
    });
  }
  if (rows == 0) return;
  const int64_t rows_a_block = kOccupancyThreads * kRowsEach;
  launch(occupancy_kernel<topology, real>,
         static_cast<uint32_t>((rows + rows_a_block - 1) / rows_a_block), kOccupancyThreads, 0,
         geometry, rows, delay_penalty, arrays);
}

}  // namespace

void band_lattice(const Launcher& launch, const View& px, const View& py, const View& logit_lengths,
                  const View& target_lengths, const OptionalView& start,
                  const OptionalView& row_splits, int64_t T, int64_t S, int64_t rnnt_type,
                  double delay_penalty, const View& alpha, const View& beta, const View& total,
                  const View& gx, const View& gy) {
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             std::numeric_limits<int32_t>::max() - 1);
  if (geometry.N == 0) return;
  dispatch_accumulator(px.scalar_type(), "band_lattice", [&](auto zero) {
    using real = decltype(zero);
    const LatticeArrays<real> arrays{data_of<real>(px),
                                     data_of<real>(py),
                                     mutable_data_of<real>(alpha),
                                     mutable_data_of<real>(beta),
                                     mutable_data_of<real>(total),
                                     mutable_data_of<real>(gx),
                                     mutable_data_of<real>(gy)};
    dispatch_topology(rnnt_type, [&](auto topology) {
      run<real, decltype(topology)::value>(launch, geometry, px.numel(),
                                           static_cast<real>(delay_penalty), arrays);
    });
  });
}

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("band_lattice", TORCH_BOX(&DeviceOp<&band_lattice>::call));
}

}  // namespace cuda
}  // namespace pruned_rnnt
