// band_lattice: the recursion over lattices kept as rows, both walks of an utterance by one block.
// Bands of few columns go by segments of their frames (band_segments.cuh), wider ones by a thread
// for each column (band_walk.cuh), whole lattices as a wave (lattice_wave.cuh). Bands that move
// back, or are wider than a block, are rare and slower (band_diagonals.cuh). Contract:
// pruned_rnnt/ops/band_lattice.py.
//
// Axes: N utterances, T frames, S columns of a frame, R rows.
#include "cuda/band_diagonals.cuh"
#include "cuda/band_segments.cuh"
#include "cuda/band_walk.cuh"
#include "cuda/lattice_wave.cuh"
#include "cuda/ops.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

template <typename real>
struct LatticeArrays {
  const real *px, *py;
  real *total, *gx, *gy;
};

template <typename real>
__device__ BandLattice<real> band_of(const RowGeometry& geometry, const LatticeArrays<real>& arrays,
                                     int32_t n, real delay_penalty) {
  const int64_t first = geometry.first_row_of(n);
  return {arrays.px + first,
          arrays.py + first,
          geometry.start + static_cast<int64_t>(n) * geometry.T,
          arrays.gx + first,
          arrays.gy + first,
          geometry.frames_of(n),
          geometry.target_lengths[n],
          geometry.S,
          delay_penalty};
}

// Ends an utterance: its log P, and zeros in the rows that the walks have left out: those behind
// its frames, the columns from `columns` on of each frame, and all if no path leads through.
// `rows`: of all utterances. Called by all threads of the block, behind a barrier.
template <typename real>
__device__ void finish_utterance(const RowGeometry& geometry, const LatticeArrays<real>& arrays,
                                 int32_t n, int64_t rows, int32_t columns, real total) {
  if (threadIdx.x == 0) arrays.total[n] = total;
  const int64_t first = geometry.first_row_of(n), width = geometry.width_of(n);
  int64_t count = geometry.utterance_rows;
  if (geometry.row_splits != nullptr) count = min(rows, geometry.row_splits[n + 1]) - first;
  const bool has_path = total != minus_infinity<real>();
  const int64_t frames = has_path ? geometry.frames_of(n) : 0;
  for (int64_t i = frames * width + threadIdx.x; i < count; i += blockDim.x) {
    arrays.gx[first + i] = arrays.gy[first + i] = 0;
  }
  for (int64_t t = threadIdx.x / 32; t < frames; t += blockDim.x / 32) {
    for (int64_t j = columns + threadIdx.x % 32; j < width; j += 32) {
      arrays.gx[first + t * width + j] = arrays.gy[first + t * width + j] = 0;
    }
  }
}

// Bands of up to `most` columns.
template <typename real, Topology topology, int most>
__global__ void __launch_bounds__(kSegmentThreads)
    narrow_band_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                       LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const BandLattice<real> band = band_of(geometry, arrays, n, delay_penalty);
  __shared__ real total;
  __shared__ SegmentMemory<real, most> memory;
  if (threadIdx.x == 0) total = minus_infinity<real>();
  // Has a barrier.
  const bool decreases = start_decreases(band.start, band.frames);
  real log_p = minus_infinity<real>();
  if (band.frames > 0 && decreases) {
    log_p = DiagonalWalk<real, topology>(band).run();
  } else if (band.frames > 0) {
    SegmentWalk<real, topology, most>(band).run(memory, &total);
    log_p = total;
  }
  __syncthreads();
  finish_utterance(geometry, arrays, n, rows, geometry.S, log_p);
}

constexpr int kWidestBlock = 1024;
// Less than the columns for which any device has room in shared memory.
constexpr int kFewThreads = 256;

// Bands of any width, with a thread for each column if there can be.
template <typename real, Topology topology>
__global__ void __launch_bounds__(kWidestBlock)
    wide_band_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                     LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const BandLattice<real> band = band_of(geometry, arrays, n, delay_penalty);
  __shared__ real total;
  if (threadIdx.x == 0) total = minus_infinity<real>();
  const bool decreases = start_decreases(band.start, band.frames);
  real log_p = minus_infinity<real>();
  if (band.frames > 0 && (decreases || band.columns > static_cast<int32_t>(blockDim.x))) {
    log_p = DiagonalWalk<real, topology>(band).run();
  } else if (band.frames > 0) {
    const BandMemory<real> memory = BandMemory<real>::make();
    BandWalk<real, topology, true>(band, memory).run(&total);
    __syncthreads();
    log_p = total;
    if (log_p != minus_infinity<real>()) BandWalk<real, topology, false>(band, memory).run(nullptr);
  }
  __syncthreads();
  finish_utterance(geometry, arrays, n, rows, geometry.S, log_p);
}

template <typename real, Topology topology, int team_warps>
__global__ void __launch_bounds__(kWaveThreads<real, team_warps>)
    full_lattice_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                        LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const int64_t first = geometry.first_row_of(n), width = geometry.width_of(n);
  const int32_t frames = geometry.frames_of(n), symbols = geometry.target_lengths[n];
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
  const real total = walk_lattice<real, topology, false, team_warps>(lattice);
  __syncthreads();
  finish_utterance(geometry, arrays, n, rows, symbols + 1, total);
}

// The usual band is narrower than what goes by segments, and needs fewer registers.
constexpr int kUsualColumns = 5, kSegmentColumns = 8;

template <typename real, Topology topology>
void run(const Launcher& launch, const RowGeometry& geometry, int64_t rows, real delay_penalty,
         const LatticeArrays<real>& arrays) {
  const uint32_t N = geometry.N;
  const int64_t S = geometry.S;
  if (geometry.start != nullptr && S <= kSegmentColumns) {
    const auto kernel = S <= kUsualColumns ? narrow_band_kernel<real, topology, kUsualColumns>
                                           : narrow_band_kernel<real, topology, kSegmentColumns>;
    launch(kernel, N, kSegmentThreads, 0, geometry, rows, delay_penalty, arrays);
    return;
  }
  const DeviceLimits limits = launch.limits();
  if (geometry.start != nullptr) {
    int64_t threads = (S + 31) / 32 * 32;
    size_t bytes = threads * BandMemory<real>::kThreadBytes;
    if (threads > kWidestBlock || bytes > static_cast<size_t>(limits.shared_bytes)) {
      // Fewer threads than columns: the kernel goes by diagonals.
      threads = kFewThreads;
      bytes = 0;
    }
    launch(wide_band_kernel<real, topology>, N, static_cast<uint32_t>(threads), bytes, geometry,
           rows, delay_penalty, arrays);
    return;
  }
  const WaveBlock<real> block = wave_block<real, false>(S, limits);
  block.dispatch([&](auto team_warps) {
    launch(full_lattice_kernel<real, topology, decltype(team_warps)::value>, N, block.threads,
           block.shared_bytes, geometry, rows, delay_penalty, arrays);
  });
}

}  // namespace

void band_lattice(const Launcher& launch, const View& px, const View& py, const View& logit_lengths,
                  const View& target_lengths, const OptionalView& start,
                  const OptionalView& row_splits, int64_t T, int64_t S, int64_t rnnt_type,
                  double delay_penalty, const View& total, const View& gx, const View& gy) {
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             std::numeric_limits<int32_t>::max() - 1);
  if (geometry.N == 0) return;
  dispatch_accumulator(px.scalar_type(), "band_lattice", [&](auto zero) {
    using real = decltype(zero);
    const LatticeArrays<real> arrays{data_of<real>(px), data_of<real>(py),
                                     mutable_data_of<real>(total), mutable_data_of<real>(gx),
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
