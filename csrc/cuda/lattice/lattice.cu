// lattice: the mutual-information recursion in k2's layout with boundaries, by the walks of
// lattice_wave.cuh with frames contiguous in memory. Contract: pruned_rnnt/ops/lattice/lattice.py.
//
// Axes: N utterances, T frames, U symbols.
#include "contracts/lattice.h"
#include "cuda/common/device_op.cuh"
#include "cuda/lattice/lattice_wave.cuh"

namespace pruned_rnnt::cuda {
namespace {

// Begin and size of an utterance's recursion; frames is 0 if it has no path.
struct Rectangle {
  int32_t u_begin, t_begin, symbols, frames;
};

struct Shape {
  int32_t T, U, px_frames;  // px_frames: frames that px and gx have
  const int32_t* boundary;  // (N,4), or null

  RNNT_DEVICE Rectangle rectangle(int64_t n) const {
    if (boundary == nullptr) return {0, 0, U, T};
    const int32_t* edge = boundary + 4 * n;
    const int32_t u_begin = edge[0], t_begin = edge[1], u_end = edge[2], t_end = edge[3];
    const bool fits = u_begin >= 0 && t_begin >= 0 && u_end <= U && t_end <= T;
    if (!fits || u_begin > u_end || t_begin >= t_end) return {0, 0, 0, 0};
    return {u_begin, t_begin, u_end - u_begin, t_end - t_begin};
  }
};

// Frames begin .. end of an utterance that belong to a block; the walks have written those of
// [kept_begin, kept_end) in the rows that have nodes.
struct FrameRange {
  int32_t begin, end, kept_begin, kept_end;
};

// Clears all other elements of a block's frames, by all threads of the block.
template <typename real>
__device__ void clear_outside(real* data, int32_t rows, int32_t length, int32_t u_begin,
                              int32_t u_end, const FrameRange& range) {
  for (int32_t u = threadIdx.x / 32; u < rows; u += blockDim.x / 32) {
    real* row = data + int64_t(u) * length;
    const bool has_nodes = u >= u_begin && u < u_end;
    for (int32_t t = range.begin + threadIdx.x % 32; t < min(range.end, length); t += 32) {
      if (!has_nodes || t < range.kept_begin || t >= range.kept_end) row[t] = 0;
    }
  }
}

// The sums of a half (blockIdx.y) of each utterance, then its masses.
template <typename real, Topology topology, int team_warps, bool sums>
__global__ void __launch_bounds__(kWaveThreads<real, team_warps>)
    lattice_kernel(Shape shape, LatticeArrays<real> arrays) {
  const int64_t n = blockIdx.x;
  const bool early = blockIdx.y == 1;
  const Rectangle inside = shape.rectangle(n);
  const int64_t T = shape.T, U = shape.U, px_frames = shape.px_frames;
  const auto plane = [&](auto* base, int64_t columns, int64_t length) {
    return base + (n * columns + inside.u_begin) * length + inside.t_begin;
  };
  // `regular` can emit in the last frame, and only then px has it.
  const int32_t gx_frames = inside.frames + (topology == Topology::kRegular ? 1 : 0);
  const CutMemory<real> cut(arrays.work, gridDim.x, U + 1, n, {n * T, T});
  double log_p = minus_infinity<double>();
  if (!sums && inside.frames > 0) log_p = log_total(cut, inside.symbols + 1);
  const bool has_path = inside.frames > 0 && (sums || log_p != minus_infinity<double>());
  if (has_path) {
    const WaveLattice<real> lattice{{plane(arrays.px, U, px_frames), 1, px_frames},
                                    {plane(arrays.py, U + 1, T), 1, T},
                                    {plane(arrays.gx, U, px_frames), 1, px_frames},
                                    {plane(arrays.gy, U + 1, T), 1, T},
                                    inside.frames,
                                    inside.symbols,
                                    topology == Topology::kRna ? gx_frames - 1 : gx_frames,
                                    gx_frames,
                                    real(0),
                                    real(0)};
    walk_half<real, topology, Layout::kFrames, team_warps, sums>(lattice, early, cut, log_p);
  }
  if (sums) return;
  if (!early && threadIdx.x == 0) arrays.total[n] = static_cast<real>(log_p);
  // An empty range of rows is outside everywhere.
  const int32_t u_begin = inside.u_begin, u_end = has_path ? u_begin + inside.symbols : u_begin;
  const int32_t middle = inside.t_begin + cut_of(inside.frames);
  const auto range = [&](int32_t frames) {
    return early ? FrameRange{0, middle, inside.t_begin, middle}
                 : FrameRange{middle, shape.T + 1, middle, inside.t_begin + frames};
  };
  clear_outside(arrays.gx + n * U * px_frames, shape.U, shape.px_frames, u_begin, u_end,
                range(gx_frames));
  clear_outside(arrays.gy + n * (U + 1) * T, shape.U + 1, shape.T, u_begin,
                has_path ? u_end + 1 : u_begin, range(inside.frames));
}

void lattice(const Launcher& launch, const View& px, const View& py, const OptionalView& boundary,
             int64_t rnnt_type, const View& work, const View& total, const View& gx,
             const View& gy) {
  const int64_t N = py.size(0), U = py.size(1) - 1, T = py.size(2);
  if (N == 0) return;
  const Shape shape{int32_t(T), int32_t(U), int32_t(px.size(2)), data_or_null<int32_t>(boundary)};
  dispatch_accumulator(px.scalar_type(), "lattice", [&](auto zero) {
    using real = decltype(zero);
    const LatticeArrays<real> arrays{
        data_of<real>(px),         data_of<real>(py),         mutable_data_of<real>(total),
        mutable_data_of<real>(gx), mutable_data_of<real>(gy), mutable_data_of<real>(work)};
    const WaveBlock<real> block = wave_block<real, Layout::kFrames>(U + 1, launch.shared_bytes());
    dispatch_topology(rnnt_type, [&](auto topology_constant) {
      constexpr Topology topology = decltype(topology_constant)::value;
      block.dispatch([&](auto team_warps) {
        constexpr int warps = decltype(team_warps)::value;
        const dim3 halves(uint32_t(N), 2);
        launch(lattice_kernel<real, topology, warps, true>, halves, block.threads,
               block.shared_bytes, shape, arrays);
        launch(lattice_kernel<real, topology, warps, false>, halves, block.threads,
               block.shared_bytes, shape, arrays);
      });
    });
  });
}

}  // namespace

PRUNED_RNNT_CUDA_OP(lattice)

}  // namespace pruned_rnnt::cuda
