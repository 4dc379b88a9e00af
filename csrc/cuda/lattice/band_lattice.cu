// band_lattice: the recursion over lattices stored as rows. Bands of up to kSegmentColumns columns
// go by segments of their frames (band_segments.cuh), one block for each utterance; wider ones and
// whole lattices as a wave (row_lattice.cu). Contract: pruned_rnnt/ops/lattice/lattice.py.
//
// Axes: N utterances, T frames, S columns of a frame, R rows.
#include "contracts/rows.h"
#include "cuda/lattice/band_segments.cuh"
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
  __syncthreads();
  if (band.frames > 0) SegmentWalk<real, topology, most>(band).run(memory, &total);
  __syncthreads();
  if (threadIdx.x == 0) arrays.total[n] = total;
  // The walk has written all columns of its frames.
  clear_rows(geometry, arrays, n, total == minus_infinity<real>(), RowRange::all(band.frames), rows,
             band.columns - 1, nullptr);
}

// The usual band is narrower than kSegmentColumns and needs fewer registers.
constexpr int kUsualColumns = 5, kSegmentColumns = 8;

}  // namespace

void band_lattice(const Launcher& launch, const View& px, const View& py,
                  const LatticeRows& lattice, int64_t rnnt_type, double delay_penalty,
                  const View& work, const View& total, const View& gx, const View& gy) {
  const RowGeometry geometry(lattice);
  if (geometry.N == 0) return;
  dispatch_accumulator(px.scalar_type(), "band_lattice", [&](auto zero) {
    using real = decltype(zero);
    const LatticeArrays<real> arrays{
        data_of<real>(px),         data_of<real>(py),         mutable_data_of<real>(total),
        mutable_data_of<real>(gx), mutable_data_of<real>(gy), mutable_data_of<real>(work)};
    const real delay = static_cast<real>(delay_penalty);
    if (geometry.start == nullptr || lattice.S > kSegmentColumns) {
      row_lattice(launch, geometry, px.numel(), rnnt_type, delay, arrays);
      return;
    }
    dispatch_topology(rnnt_type, [&](auto topology_constant) {
      constexpr Topology topology = decltype(topology_constant)::value;
      const auto kernel = lattice.S <= kUsualColumns
                              ? narrow_band_kernel<real, topology, kUsualColumns>
                              : narrow_band_kernel<real, topology, kSegmentColumns>;
      launch(kernel, uint32_t(geometry.N), kSegmentThreads, 0, geometry, px.numel(), delay, arrays);
    });
  });
}

PRUNED_RNNT_CUDA_OP(band_lattice)

}  // namespace pruned_rnnt::cuda
