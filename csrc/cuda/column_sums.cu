// column_sums: the sums over the rows of a matrix, in an order that depends on its shape alone.
// Contract: pruned_rnnt/ops/column_sums.py.
//
// Axes: R rows, C columns, P parts of the rows.
#include "cuda/ops.cuh"
#include "cuda/vector_access.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

constexpr int kThreads = 256;
// Rows whose loads a thread has in flight.
template <typename scalar, int width>
constexpr int kAhead = sizeof(scalar) * width < 16 ? 8 : 4;
// A block of the second stage: 32 columns, and as many groups of parts.
constexpr int kGroups = 32;

struct Matrix {
  int64_t rows, columns, stride;
  int64_t rows_a_part;
};

template <typename real>
__device__ __forceinline__ void put(real* target, real sum, bool add) {
  *target = add ? *target + sum : sum;
}

template <bool whole, typename scalar, int width>
__device__ __forceinline__ Vector<scalar, width> load_columns(const scalar* address,
                                                              int64_t columns) {
  if (whole) return load_vector<width>(address);
  Vector<scalar, width> value{};
#pragma unroll
  for (int k = 0; k < width; ++k) {
    if (k < columns) value.x[k] = address[k];
  }
  return value;
}

// Adds rows begin, begin + step, ... below `end`, of which `columns` columns are there.
template <bool whole, int width, typename scalar>
__device__ __forceinline__ void add_rows(const scalar* x, int64_t stride, int64_t begin,
                                         int64_t end, int step, int64_t columns,
                                         acc_type<scalar> (&sum)[width]) {
  using real = acc_type<scalar>;
  constexpr int ahead = kAhead<scalar, width>;
  const scalar* address = x + begin * stride;
  for (int64_t row = begin; row < end; row += ahead * step) {
    Vector<scalar, width> value[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      value[i] = Vector<scalar, width>{};
      if (row + i * step < end) value[i] = load_columns<whole, scalar, width>(address, columns);
      address += step * stride;
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] += static_cast<real>(value[i].x[k]);
    }
  }
}

// A block for each part of the rows and each tile of columns. `across` threads, a power of 2, lie
// along a row; kThreads / across rows are read at a time.
template <typename scalar, int width>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(Matrix matrix, int across, bool add, const scalar* __restrict__ x,
                       acc_type<scalar>* __restrict__ target) {
  using real = acc_type<scalar>;
  __shared__ real sums[width][kThreads];
  const int lane = threadIdx.x & (across - 1), group = threadIdx.x / across;
  const int groups = kThreads / across;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * across + lane) * width;
  const int64_t left = matrix.columns - c;
  const int64_t begin = blockIdx.y * matrix.rows_a_part;
  const int64_t end = min(matrix.rows, begin + matrix.rows_a_part);
  real sum[width] = {};
  if (left >= width) {
    add_rows<true, width>(x + c, matrix.stride, begin + group, end, groups, left, sum);
  } else if (left > 0) {
    add_rows<false, width>(x + c, matrix.stride, begin + group, end, groups, left, sum);
  }
  for (int half = groups / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < width; ++k) sums[k][threadIdx.x] = sum[k];
    __syncthreads();
    if (group < half) {
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] += sums[k][threadIdx.x + half * across];
    }
    __syncthreads();
  }
  if (group > 0) return;
  target += blockIdx.y * matrix.columns + c;
#pragma unroll
  for (int k = 0; k < width; ++k) {
    if (k < left) put(target + k, sum[k], add);
  }
}

// The sums of the parts.
template <typename real>
__global__ void __launch_bounds__(32 * kGroups)
    column_sums_parts_kernel(int64_t C, int32_t P, bool add, const real* __restrict__ partial,
                             real* __restrict__ target) {
  __shared__ real sums[kGroups][33];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  real sum = 0;
  if (c < C) {
#pragma unroll 16
    for (int32_t p = group; p < P; p += kGroups) sum += partial[p * C + c];
  }
  sums[group][lane] = sum;
  __syncthreads();
  // Now a warp has a column, and a lane one of its groups.
  sum = sums[lane][group];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 32 + group;
  if (lane == 0 && at < C) put(target + at, sum, add);
}

}  // namespace

void column_sums(const Tensor& x, bool add, const Tensor& partial, const Tensor& sums) {
  const int64_t R = x.size(0), C = x.size(1), P = partial.size(0);
  if (C == 0) return;
  const Launcher launch(x);
  dispatch_floating(x.scalar_type(), "column_sums", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    real* parts = mutable_data_of<real>(partial);
    real* target = mutable_data_of<real>(sums);
    dispatch_width<scalar>(widest_vector<scalar>(x.data_ptr(), x.stride(0)), [&](auto chosen) {
      constexpr int width = decltype(chosen)::value;
      int across = 1;
      while (across < kThreads && across * width < C) across *= 2;
      const int64_t tile = across * width;
      launch(column_sums_kernel<scalar, width>,
             dim3(static_cast<uint32_t>((C + tile - 1) / tile), static_cast<uint32_t>(P)), kThreads,
             0, Matrix{R, C, x.stride(0), (R + P - 1) / P}, across, P == 1 && add,
             data_of<scalar>(x), P == 1 ? target : parts);
    });
    if (P == 1) return;
    launch(column_sums_parts_kernel<real>, static_cast<uint32_t>((C + 31) / 32), 32 * kGroups, 0, C,
           static_cast<int32_t>(P), add, parts, target);
  });
}

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) { m.impl("column_sums", TORCH_BOX(&column_sums)); }

}  // namespace cuda
}  // namespace pruned_rnnt
