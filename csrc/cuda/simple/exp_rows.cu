// exp_rows: exp(x - max x) of each row, which is read once if it fits into registers, and its
// log-sum-exp. Contract and storage: pruned_rnnt/ops/simple/simple_products.py.
//
// Axes: N batch, L rows of an utterance, V vocabulary; L' and V' padded for storage. The parts of
// an utterance's exponentials, (L',V') each, are behind each other.
#include "contracts/simple.h"
#include "cuda/common/arithmetic.cuh"
#include "cuda/common/ops.cuh"
#include "cuda/common/vector_access.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
// Elements that a lane keeps in registers between finding the maximum and subtracting it.
constexpr int kKept = 32;

// One of the inputs of a launch.
template <typename scalar, typename stored>
struct RowsOf {
  const int32_t* lengths;
  const scalar* x;
  acc_type<scalar>*row_max, *row_lse;
  stored* x_exp;
  int64_t rows, L, stored_rows;  // of a part of all utterances; L and L' of an utterance
  int32_t parts, extra;
};

template <typename scalar, typename stored>
struct RowsList {
  std::array<RowsOf<scalar, stored>, kMostExpRows> all;
  int32_t V, stored_V;
};

// Reduces `value` over a group by combine; groups of several warps exchange it through `shared`.
template <int lanes, typename real, typename Combine>
RNNT_DEVICE real group_reduced(real value, real* shared, Combine&& combine) {
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
__global__ void __launch_bounds__(kThreads) exp_rows_kernel(RowsList<scalar, stored> list) {
  using real = acc_type<scalar>;
  constexpr int kept_vectors = kKept / width;
  __shared__ real maxima[kThreads / 32], sums[kThreads / 32];
  const RowsOf<scalar, stored>& input = list.all[blockIdx.y];
  const int32_t V = list.V, stored_V = list.stored_V;
  const int lane = threadIdx.x % lanes;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (row >= input.rows) return;
  const int64_t n = row / input.stored_rows, l = row - n * input.stored_rows;
  const int64_t part_size = input.stored_rows * stored_V;
  stored* const high = input.x_exp + n * input.parts * part_size + l * stored_V;
  const int32_t parts = input.parts;
  const bool inside = l < input.lengths[n] + input.extra && l < input.L;
  for (int32_t v = (inside ? V : 0) + lane; v < stored_V; v += lanes) {
    for (int32_t part = 0; part < parts; ++part) high[part * part_size + v] = stored(0.0f);
  }
  const int64_t input_row = n * input.L + l;
  if (!inside) {
    if (lane == 0 && l < input.L) input.row_max[input_row] = input.row_lse[input_row] = 0;
    return;
  }
  const scalar* source = input.x + input_row * V;
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
    // Stored in parts of 16 bytes.
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
      stored* const target = high + at(vector) + begin;
      store_vector<part>(target, result);
      if (parts > 1) store_vector<part>(target + part_size, rest);
      if (parts > 2) store_vector<part>(target + 2 * part_size, result);
    }
  };
#pragma unroll
  for (int k = 0; k < kept_vectors; ++k) {
    if (at(k) < V) write(k, kept[k]);
  }
  for (int k = kept_vectors; at(k) < V; ++k) write(k, load_vector<width>(source + at(k)));
  sum = group_reduced<lanes>(sum, sums, [](real a, real b) { return a + b; });
  if (lane == 0) {
    input.row_max[input_row] = largest;
    input.row_lse[input_row] = largest + log_of(sum);
  }
}

}  // namespace

void exp_rows_of(const Launcher& launch, const ExpRows* all, int count) {
  const int64_t V = all[0].x.size(2), stored_V = all[0].x_exp.size(3);
  dispatch_floating(all[0].x.scalar_type(), "exp_rows", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const auto run = [&](auto stored_zero) {
      using stored = decltype(stored_zero);
      RowsList<scalar, stored> list{{}, int32_t(V), int32_t(stored_V)};
      int64_t rows = 0;
      int widest = 16 / sizeof(scalar);
      for (int i = 0; i < count; ++i) {
        const ExpRows& one = all[i];
        const View &x = one.x, &x_exp = one.x_exp;
        list.all[i] = {data_of<int32_t>(one.lengths),
                       data_of<scalar>(x),
                       mutable_data_of<real>(one.row_max),
                       mutable_data_of<real>(one.row_lse),
                       mutable_data_of<stored>(x_exp),
                       x_exp.size(0) * x_exp.size(2),
                       x.size(1),
                       x_exp.size(2),
                       int32_t(x_exp.size(1)),
                       int32_t(one.extra)};
        rows = std::max(rows, list.all[i].rows);
        widest = std::min({widest, widest_vector<scalar>(x.data_ptr(), V),
                           widest_vector<scalar>(x_exp.data_ptr(), stored_V)});
      }
      if (rows == 0) return;
      dispatch_width<scalar>(widest, [&](auto width_constant) {
        constexpr int width = decltype(width_constant)::value;
        const auto with_lanes = [&](auto lanes_constant) {
          constexpr int lanes = decltype(lanes_constant)::value;
          constexpr int rows_a_block = kThreads / lanes;
          launch(exp_rows_kernel<scalar, stored, lanes, width>,
                 dim3(uint32_t((rows + rows_a_block - 1) / rows_a_block), count), kThreads, 0,
                 list);
        };
        if (V <= 32 * kKept) {
          with_lanes(std::integral_constant<int, 32>());
        } else {
          with_lanes(std::integral_constant<int, kThreads>());
        }
      });
    };
    if constexpr (!std::is_same_v<real, double>) {
      if (all[0].x_exp.scalar_type() == ScalarType::BFloat16) return run(BFloat16());
    }
    run(real());
  });
}

void exp_rows(const Launcher& launch, const View& x, const View& lengths, int64_t extra,
              const View& row_max, const View& row_lse, const View& x_exp) {
  const ExpRows one{x, lengths, extra, row_max, row_lse, x_exp};
  exp_rows_of(launch, &one, 1);
}

PRUNED_RNNT_CUDA_OP(exp_rows)

}  // namespace pruned_rnnt::cuda
