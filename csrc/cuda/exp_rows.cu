// exp_rows: rows of exp(x - max x), each read once as long as it fits into registers. Contract:
// pruned_rnnt/ops/simple_log_probs.py.
//
// Axes: N batch, L rows of an utterance, V vocabulary.
#include "cuda/arithmetic.cuh"
#include "cuda/vector_access.cuh"
#include "fast_divmod.h"

namespace pruned_rnnt {
namespace cuda {
namespace {

constexpr int kThreads = 256;
// Elements a lane keeps between finding the maximum and subtracting it.
constexpr int kKept = 32;

// The maximum of a group's `value`; blocks exchange it through shared memory.
template <int lanes, typename real>
__device__ __forceinline__ real group_maximum(real value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmax(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (lanes > 32) {
    __shared__ real maxima[kThreads / 32];
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < lanes / 32; ++warp) value = fmax(value, maxima[warp]);
  }
  return value;
}

// A warp or a block for each row.
template <typename scalar, int lanes, int width>
__global__ void __launch_bounds__(kThreads)
    exp_rows_kernel(int64_t rows, int64_t L, int32_t V, int32_t extra,
                    const int32_t* __restrict__ lengths, const scalar* __restrict__ x,
                    acc_type<scalar>* __restrict__ row_max, acc_type<scalar>* __restrict__ x_exp) {
  using real = acc_type<scalar>;
  constexpr int kept_vectors = kKept / width;
  const int lane = threadIdx.x % lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (row >= rows) return;
  const int64_t n = row / L;
  const scalar* source = x + row * V;
  real* target = x_exp + row * V;
  if (row - n * L >= lengths[n] + extra) {
    for (int32_t v = lane; v < V; v += lanes) target[v] = 0;
    if (lane == 0) row_max[row] = 0;
    return;
  }
  const auto at = [&](int vector) { return (vector * lanes + lane) * width; };
  Vector<scalar, width> kept[kept_vectors];
  real largest = minus_infinity<real>();
  const auto look = [&](const Vector<scalar, width>& values) {
#pragma unroll
    for (int i = 0; i < width; ++i) largest = fmax(largest, static_cast<real>(values.x[i]));
  };
#pragma unroll
  for (int k = 0; k < kept_vectors; ++k) {
    if (at(k) < V) kept[k] = load_vector<width>(source + at(k));
  }
#pragma unroll
  for (int k = 0; k < kept_vectors; ++k) {
    if (at(k) < V) look(kept[k]);
  }
  for (int k = kept_vectors; at(k) < V; ++k) look(load_vector<width>(source + at(k)));
  largest = group_maximum<lanes>(largest);
  if (largest == minus_infinity<real>()) largest = 0;
  if (lane == 0) row_max[row] = largest;

  const auto write = [&](int vector, const Vector<scalar, width>& values) {
    // As many elements as make 16 bytes of the accumulator.
    constexpr int part = width * sizeof(real) > 16 ? 16 / sizeof(real) : width;
#pragma unroll
    for (int begin = 0; begin < width; begin += part) {
      Vector<real, part> result;
#pragma unroll
      for (int i = 0; i < part; ++i) {
        result.x[i] = exp_of(static_cast<real>(values.x[begin + i]) - largest);
      }
      store_vector<part>(target + at(vector) + begin, result);
    }
  };
#pragma unroll
  for (int k = 0; k < kept_vectors; ++k) {
    if (at(k) < V) write(k, kept[k]);
  }
  for (int k = kept_vectors; at(k) < V; ++k) write(k, load_vector<width>(source + at(k)));
}

void exp_rows(const Tensor& x, const Tensor& lengths, int64_t extra, const Tensor& row_max,
              const Tensor& x_exp) {
  const int64_t L = x.size(1), V = x.size(2), rows = x.size(0) * L;
  if (rows == 0) return;
  const Launcher launch(x);
  dispatch_floating(x.scalar_type(), "exp_rows", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const auto run = [&](auto width_constant, auto lanes_constant) {
      constexpr int width = decltype(width_constant)::value;
      constexpr int lanes = decltype(lanes_constant)::value;
      constexpr int rows_a_block = kThreads / lanes;
      launch(exp_rows_kernel<scalar, lanes, width>,
             static_cast<uint32_t>((rows + rows_a_block - 1) / rows_a_block), kThreads, 0, rows, L,
             static_cast<int32_t>(V), static_cast<int32_t>(extra), data_of<int32_t>(lengths),
             data_of<scalar>(x), mutable_data_of<real>(row_max), mutable_data_of<real>(x_exp));
    };
    dispatch_width<scalar>(widest_vector<scalar>(x.data_ptr(), V), [&](auto width) {
      if (V <= 32 * kKept) {
        run(width, std::integral_constant<int, 32>());
      } else {
        run(width, std::integral_constant<int, kThreads>());
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) { m.impl("exp_rows", TORCH_BOX(&exp_rows)); }

}  // namespace cuda
}  // namespace pruned_rnnt
