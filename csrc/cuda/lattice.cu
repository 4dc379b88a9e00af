// lattice: the mutual-information recursion in k2's layout, with boundaries. Contract:
// pruned_rnnt/ops/lattice.py; the walk is that of lattice_wave.cuh with frames running in memory.
//
// Axes: N utterances, T frames, U symbols.
#include "cuda/device_op.cuh"
#include "cuda/lattice_wave.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

// Where an utterance's recursion begins and ends. Without a path `frames` is 0.
struct Rectangle {
  int32_t u_begin, t_begin, symbols, frames;
};

struct Shape {
  int32_t T, U, emit_frames;  // emit_frames: frames that px has
  const int32_t* boundary;    // (N,4), or null

  __device__ __forceinline__ Rectangle rectangle(int64_t n) const {
    if (boundary == nullptr) return {0, 0, U, T};
    const int32_t* edge = boundary + 4 * n;
    const int32_t u_begin = edge[0], t_begin = edge[1], u_end = edge[2], t_end = edge[3];
    const bool fits = u_begin >= 0 && t_begin >= 0 && u_end <= U && t_end <= T;
    if (!fits || u_begin > u_end || t_begin >= t_end) return {0, 0, 0, 0};
    return {u_begin, t_begin, u_end - u_begin, t_end - t_begin};
  }
};

template <typename real>
struct Arrays {
  const real *px, *py;
  real *alpha, *beta, *total, *gx, *gy;
};

template <typename real, Topology topology, int team_warps>
__global__ void __launch_bounds__(kWaveThreads<real, team_warps>)
    lattice_kernel(Shape shape, Arrays<real> arrays) {
  const int64_t n = blockIdx.x;
  const bool backward = blockIdx.y == 1;
  const Rectangle inside = shape.rectangle(n);
  const int64_t T = shape.T, U = shape.U, emit_frames = shape.emit_frames;
  const auto plane = [&](auto* base, int64_t columns, int64_t length) {
    return base + (n * columns + inside.u_begin) * length + inside.t_begin;
  };
  const int64_t gx_size = U * emit_frames, gy_size = (U + 1) * T;
  // `regular` can emit in the last frame, and only then px has it.
  int32_t emitting = inside.frames;
  if (topology == Topology::kRegular) ++emitting;
  if (topology == Topology::kRna) --emitting;
  const WaveLattice<real> lattice{
      {plane(arrays.px, U, emit_frames), 1, emit_frames},
      {plane(arrays.py, U + 1, T), 1, T},
      {plane(backward ? arrays.beta : arrays.alpha, U + 1, T + 1), 1, T + 1},
      // The occupancies are not there yet: their place holds the edges.
      backward ? arrays.gy + n * gy_size : arrays.gx + n * gx_size,
      inside.frames,
      inside.symbols,
      emitting,
      inside.frames + 1,
      real(0),
      real(0)};
  if (backward) {
    walk_lattice<real, topology, true, true, team_warps>(lattice, arrays.total + n);
  } else {
    walk_lattice<real, topology, true, false, team_warps>(lattice, arrays.total + n);
  }
}

constexpr int kThreads = 256;

// A row of threads for each (n,u): occupancies, and alpha and beta outside the boundary.
template <typename real, Topology topology>
__global__ void __launch_bounds__(kThreads)
    lattice_occupancy_kernel(Shape shape, Arrays<real> arrays, int64_t rows) {
  const real none = minus_infinity<real>();
  const int64_t T = shape.T, U = shape.U, emit_frames = shape.emit_frames;
  constexpr int32_t frames_later = topology == Topology::kRegular ? 0 : 1;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t n = row / (U + 1);
    const int32_t u = static_cast<int32_t>(row - n * (U + 1));
    const Rectangle inside = shape.rectangle(n);
    const real total = arrays.total[n];
    const int32_t u_end = inside.u_begin + inside.symbols, t_end = inside.t_begin + inside.frames;
    const bool has_nodes = inside.frames > 0 && u >= inside.u_begin && u <= u_end;
    real* alpha = arrays.alpha + row * (T + 1);
    real* beta = arrays.beta + row * (T + 1);
    const real* py = arrays.py + row * T;
    // Row u of px: there is none for u = U.
    const int64_t px_offset = (n * U + u) * emit_frames;
    for (int32_t t = threadIdx.x; t <= T; t += kThreads) {
      const bool node = has_nodes && t >= inside.t_begin && t <= t_end;
      if (!node) alpha[t] = beta[t] = none;
      const bool used = node && total != none;
      const bool stays = used && t < t_end;
      real stay = 0;
      if (stays) stay = exp_of(alpha[t] + py[t] + beta[t + 1] - total);
      const auto emission = [&](const real* alpha_t, const real* px_t, real blank, real behind) {
        real weight = px_t[t];
        if (topology == Topology::kConstrained) weight += blank;
        return exp_of(alpha_t[t] + weight + behind - total);
      };
      const int32_t emit_end = topology == Topology::kRegular ? t_end + 1
                               : topology == Topology::kRna   ? t_end - 1
                                                              : t_end;
      if (topology == Topology::kConstrained && stays && u > inside.u_begin) {
        stay += emission(alpha - (T + 1), arrays.px + px_offset - emit_frames, py[t], beta[t + 1]);
      }
      if (t < T) arrays.gy[row * T + t] = stay;
      if (u < U && t < emit_frames) {
        real emit = 0;
        if (used && u < u_end && t < emit_end) {
          const real blank = topology == Topology::kConstrained ? py[T + t] : real(0);
          emit = emission(alpha, arrays.px + px_offset, blank, beta[T + 1 + t + frames_later]);
        }
        arrays.gx[px_offset + t] = emit;
      }
    }
  }
}

void lattice(const Launcher& launch, const View& px, const View& py, const OptionalView& boundary,
             int64_t rnnt_type, const View& alpha, const View& beta, const View& total,
             const View& gx, const View& gy) {
  const int64_t N = py.size(0), U = py.size(1) - 1, T = py.size(2);
  if (N == 0) return;
  const Shape shape{static_cast<int32_t>(T), static_cast<int32_t>(U),
                    static_cast<int32_t>(px.size(2)), data_or_null<int32_t>(boundary)};
  const DeviceLimits limits = launch.limits();
  dispatch_accumulator(px.scalar_type(), "lattice", [&](auto zero) {
    using real = decltype(zero);
    const Arrays<real> arrays{data_of<real>(px),
                              data_of<real>(py),
                              mutable_data_of<real>(alpha),
                              mutable_data_of<real>(beta),
                              mutable_data_of<real>(total),
                              mutable_data_of<real>(gx),
                              mutable_data_of<real>(gy)};
    const WaveBlock<real> block = wave_block<real, true>(U + 1, limits);
    const int64_t rows = N * (U + 1);
    const uint32_t blocks =
        static_cast<uint32_t>(std::min<int64_t>(rows, 64 * limits.multiprocessors));
    dispatch_topology(rnnt_type, [&](auto topology_constant) {
      constexpr Topology topology = decltype(topology_constant)::value;
      block.dispatch([&](auto team_warps) {
        launch(lattice_kernel<real, topology, decltype(team_warps)::value>,
               dim3(static_cast<uint32_t>(N), 2), block.threads, block.shared_bytes, shape, arrays);
      });
      launch(lattice_occupancy_kernel<real, topology>, blocks, kThreads, 0, shape, arrays, rows);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("lattice", TORCH_BOX(&DeviceOp<&lattice>::call));
}

}  // namespace cuda
}  // namespace pruned_rnnt
