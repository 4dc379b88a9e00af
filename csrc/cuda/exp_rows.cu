// exp_rows: rows of exp(x - max x), each read once as long as it fits into registers, and their
// log-sum-exp. Contract: pruned_rnnt/ops/simple_log_probs.py; how exponentials are stored:
// pruned_rnnt/ops/simple_products.py.
//
// Axes: N batch, L rows of an utterance, V vocabulary; L' and V' with what storage adds.
#include "cuda/arithmetic.cuh"
#include "cuda/ops.cuh"
#include "cuda/vector_access.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

constexpr int kThreads = 256;
// Elements a lane keeps between finding the maximum and subtracting it.
constexpr int kKept = 32;

struct RowSizes {
  int64_t rows, L, stored_rows;  // all stored rows; L and L' of an utterance
  int32_t V, stored_V, extra;
};

// Reduces a group's `value` by combine; blocks exchange it through `shared`.
template <int lanes, typename real, typename Combine>
__device__ __forceinline__ real group_reduced(real value, real* shared, Combine&& combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (lanes > 32) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (int warp = 1; warp < lanes / 32; ++warp) value = combine(value, shared[warp]);
  }
  return value;
}

// A warp or a block for each row. stored is the accumulator's type, or BFloat16 for parts.
template <typename scalar, typename stored, int lanes, int width>
__global__ void __launch_bounds__(kThreads)
    exp_rows_kernel(RowSizes sizes, const int32_t* __restrict__ lengths,
                    const scalar* __restrict__ x, acc_type<scalar>* __restrict__ row_max,
                    acc_type<scalar>* __restrict__ row_lse, stored* __restrict__ x_exp,
                    stored* __restrict__ x_low) {
  using real = acc_type<scalar>;
  constexpr int kept_vectors = kKept / width;
  __shared__ real maxima[kThreads / 32], sums[kThreads / 32];
  const int32_t V = sizes.V;
  const int lane = threadIdx.x % lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (row >= sizes.rows) return;
  const int64_t n = row / sizes.stored_rows, l = row - n * sizes.stored_rows;
  stored* const high = x_exp + row * sizes.stored_V;
  stored* const low = x_low != nullptr ? x_low + row * sizes.stored_V : nullptr;
  const bool inside = l < lengths[n] + sizes.extra && l < sizes.L;
  for (int32_t v = (inside ? V : 0) + lane; v < sizes.stored_V; v += lanes) {
    high[v] = stored(0.0f);
    if (low != nullptr) low[v] = stored(0.0f);
  }
  const int64_t input_row = n * sizes.L + l;
  if (!inside) {
    if (lane == 0 && l < sizes.L) row_max[input_row] = row_lse[input_row] = 0;
    return;
  }
  const scalar* source = x + input_row * V;
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
  largest = group_reduced<lanes>(largest, maxima, [](real a, real b) { return fmax(a, b); });
  if (largest == minus_infinity<real>()) largest = 0;

  real sum = 0;
  const auto write = [&](int vector, const Vector<scalar, width>& values) {
    // As many elements as make 16 bytes of what is stored.
    constexpr int part = width * sizeof(stored) > 16 ? 16 / sizeof(stored) : width;
#pragma unroll
    for (int begin = 0; begin < width; begin += part) {
      Vector<stored, part> result, rest;
#pragma unroll
      for (int i = 0; i < part; ++i) {
        const real e = exp_of(static_cast<real>(values.x[begin + i]) - largest);
        sum += e;
        result.x[i] = static_cast<stored>(e);
        rest.x[i] = static_cast<stored>(e - static_cast<real>(result.x[i]));
      }
      store_vector<part>(high + at(vector) + begin, result);
      if (low != nullptr) store_vector<part>(low + at(vector) + begin, rest);
    }
  };
#pragma unroll
  for (int k = 0; k < kept_vectors; ++k) {
    if (at(k) < V) write(k, kept[k]);
  }
  for (int k = kept_vectors; at(k) < V; ++k) write(k, load_vector<width>(source + at(k)));
  sum = group_reduced<lanes>(sum, sums, [](real a, real b) { return a + b; });
  if (lane == 0) {
    row_max[input_row] = largest;
    row_lse[input_row] = largest + log_of(sum);
  }
}

}  // namespace

void exp_rows(const Tensor& x, const Tensor& lengths, int64_t extra, const Tensor& row_max,
              const Tensor& row_lse, const Tensor& x_exp, const OptionalTensor& x_low) {
  const RowSizes sizes{x_exp.size(0) * x_exp.size(1),
                       x.size(1),
                       x_exp.size(1),
                       static_cast<int32_t>(x.size(2)),
                       static_cast<int32_t>(x_exp.size(2)),
                       static_cast<int32_t>(extra)};
  if (sizes.rows == 0) return;
  const Launcher launch(x);
  dispatch_floating(x.scalar_type(), "exp_rows", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const auto run = [&](auto stored_zero, auto width_constant, auto lanes_constant) {
      using stored = decltype(stored_zero);
      constexpr int width = decltype(width_constant)::value;
      constexpr int lanes = decltype(lanes_constant)::value;
      constexpr int rows_a_block = kThreads / lanes;
      launch(exp_rows_kernel<scalar, stored, lanes, width>,
             static_cast<uint32_t>((sizes.rows + rows_a_block - 1) / rows_a_block), kThreads, 0,
             sizes, data_of<int32_t>(lengths), data_of<scalar>(x), mutable_data_of<real>(row_max),
             mutable_data_of<real>(row_lse), mutable_data_of<stored>(x_exp),
             x_low.has_value() ? mutable_data_of<stored>(*x_low) : nullptr);
    };
    const auto run_stored = [&](auto stored_zero) {
      const int widest = std::min(widest_vector<scalar>(x.data_ptr(), sizes.V),
                                  widest_vector<scalar>(x_exp.data_ptr(), sizes.stored_V));
      dispatch_width<scalar>(widest, [&](auto width) {
        if (sizes.V <= 32 * kKept) {
          run(stored_zero, width, std::integral_constant<int, 32>());
        } else {
          run(stored_zero, width, std::integral_constant<int, kThreads>());
        }
      });
    };
    if constexpr (!std::is_same_v<real, double>) {
      if (x_exp.scalar_type() == ScalarType::BFloat16) return run_stored(BFloat16());
    }
    run_stored(real());
  });
}

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) { m.impl("exp_rows", TORCH_BOX(&exp_rows)); }

}  // namespace cuda
}  // namespace pruned_rnnt
