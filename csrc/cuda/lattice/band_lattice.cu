// band_lattice: the recursion over lattices stored as rows. Whole lattices go as a wave
// (row_lattice.cu), bands of up to kSegmentColumns columns by segments of their frames
// (band_segments.cuh), one block for each utterance. Wider bands take a thread for each column and
// a block for each half of an utterance (band_walk.cuh). Bands that move back, or are wider than a
// block, are rare and slower (band_diagonals.cuh). Contract:
// pruned_rnnt/ops/lattice/band_lattice.py.
//
// Axes: N utterances, T frames, S columns of a frame, R rows.
#include "cuda/lattice/band_diagonals.cuh"
#include "cuda/lattice/band_segments.cuh"
#include "cuda/lattice/band_walk.cuh"
#include "cuda/lattice/row_lattice.cuh"

namespace pruned_rnnt::cuda {
namespace {

template <typename real>
__device__ BandLattice<real> band_of(const RowGeometry& geometry, const LatticeArrays<real>& arrays,
                                     int32_t n, real delay_penalty) {
  const int64_t first = geometry.first_row_of(n);
  return {arrays.px + first,          arrays.py + first, geometry.start + int64_t(n) * geometry.T,
          arrays.gx + first,          arrays.gy + first, geometry.frames_of(n),
          geometry.target_lengths[n], geometry.S,        delay_penalty};
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
  if (threadIdx.x == 0) arrays.total[n] = log_p;
  clear_rows(geometry, arrays, n, log_p == minus_infinity<real>(), RowRange::all(band.frames), rows,
             band.columns);
}

constexpr int kWidestBlock = 1024;
// Fewer than the columns for which any device has room in shared memory.
constexpr int kFewThreads = 256;

// Bands of any width, with a thread for each column if possible. The sums of a half (blockIdx.y),
// then its masses.
template <typename real, Topology topology, bool sums>
__global__ void __launch_bounds__(kWidestBlock)
    wide_band_kernel(RowGeometry geometry, int64_t rows, real delay_penalty,
                     LatticeArrays<real> arrays) {
  const int32_t n = blockIdx.x;
  const bool early = blockIdx.y == 1;
  const BandLattice<real> band = band_of(geometry, arrays, n, delay_penalty);
  const bool decreases = start_decreases(band.start, band.frames);
  // Without halves: one block of the second launch does both walks.
  const bool by_diagonals = decreases || band.columns > int32_t(blockDim.x);
  if ((sums && band.frames <= 0) || (by_diagonals && (sums || early))) return;
  double log_p = minus_infinity<double>();
  if (by_diagonals) {
    if (band.frames > 0) log_p = DiagonalWalk<real, topology>(band).run();
  } else if (band.frames > 0) {
    const BandMemory<real> memory = BandMemory<real>::make();
    const CutMemory<real> cut(arrays.work, n, geometry.S, geometry.T);
    if (!sums) log_p = log_total(cut, band.columns);
    if (sums || log_p != minus_infinity<double>()) {
      constexpr Walk early_walk = sums ? Walk::kEarlySums : Walk::kEarlyMasses;
      constexpr Walk late_walk = sums ? Walk::kLateSums : Walk::kLateMasses;
      if (early) {
        BandWalk<real, topology, early_walk>(band, memory, cut, log_p).run();
      } else {
        BandWalk<real, topology, late_walk>(band, memory, cut, log_p).run();
      }
    }
  }
  if (sums) return;
  __syncthreads();
  if (!early && threadIdx.x == 0) arrays.total[n] = static_cast<real>(log_p);
  const RowRange range =
      by_diagonals ? RowRange::all(band.frames) : RowRange::half(band.frames, early);
  clear_rows(geometry, arrays, n, log_p == minus_infinity<double>(), range, rows, band.columns);
}

// The usual band is narrower than kSegmentColumns and needs fewer registers.
constexpr int kUsualColumns = 5, kSegmentColumns = 8;

template <typename real, Topology topology>
void run(const Launcher& launch, const RowGeometry& geometry, int64_t rows, real delay_penalty,
         const LatticeArrays<real>& arrays) {
  const uint32_t N = geometry.N;
  const int64_t S = geometry.S;
  if (S <= kSegmentColumns) {
    const auto kernel = S <= kUsualColumns ? narrow_band_kernel<real, topology, kUsualColumns>
                                           : narrow_band_kernel<real, topology, kSegmentColumns>;
    launch(kernel, N, kSegmentThreads, 0, geometry, rows, delay_penalty, arrays);
    return;
  }
  int64_t threads = (S + 31) / 32 * 32;
  size_t bytes = threads * BandMemory<real>::kThreadBytes;
  if (threads > kWidestBlock || bytes > static_cast<size_t>(launch.shared_bytes())) {
    // Fewer threads than columns: the kernel goes by diagonals.
    threads = kFewThreads;
    bytes = 0;
  }
  launch(wide_band_kernel<real, topology, true>, dim3(N, 2), uint32_t(threads), bytes, geometry,
         rows, delay_penalty, arrays);
  launch(wide_band_kernel<real, topology, false>, dim3(N, 2), uint32_t(threads), bytes, geometry,
         rows, delay_penalty, arrays);
}

}  // namespace

void band_lattice(const Launcher& launch, const View& px, const View& py, const View& logit_lengths,
                  const View& target_lengths, const OptionalView& start,
                  const OptionalView& row_splits, int64_t T, int64_t S, int64_t rnnt_type,
                  double delay_penalty, const View& work, const View& total, const View& gx,
                  const View& gy) {
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             std::numeric_limits<int32_t>::max() - 1);
  if (geometry.N == 0) return;
  dispatch_accumulator(px.scalar_type(), "band_lattice", [&](auto zero) {
    using real = decltype(zero);
    const LatticeArrays<real> arrays{
        data_of<real>(px),         data_of<real>(py),         mutable_data_of<real>(total),
        mutable_data_of<real>(gx), mutable_data_of<real>(gy), mutable_data_of<real>(work)};
    if (geometry.start == nullptr) {
      row_lattice(launch, geometry, px.numel(), rnnt_type, static_cast<real>(delay_penalty),
                  arrays);
      return;
    }
    dispatch_topology(rnnt_type, [&](auto topology) {
      run<real, decltype(topology)::value>(launch, geometry, px.numel(),
                                           static_cast<real>(delay_penalty), arrays);
    });
  });
}

PRUNED_RNNT_CUDA_OP(band_lattice)

}  // namespace pruned_rnnt::cuda
