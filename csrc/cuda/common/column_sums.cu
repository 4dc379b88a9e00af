// column_sums: the sums over the rows of a matrix, in an order that depends on its shape alone.
// Contract: pruned_rnnt/ops/common/matrix_products.py.
//
// Axes: R rows, C columns, P parts of the rows.
#include "contracts/rows.h"
#include "cuda/common/ops.cuh"
#include "cuda/common/vector_access.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
// Rows that a thread loads at a time.
template <typename scalar, int width>
constexpr int kAhead = sizeof(scalar) * width < 16 ? 8 : 4;
// A block of the second stage: 32 columns, and as many groups of parts.
constexpr int kGroups = 32;

// One of the matrices of a launch. The sums of its parts go to `partial`; that of a single part
// goes straight to `sums`.
template <typename scalar>
struct Summed {
  using real = acc_type<scalar>;

  const scalar* x;
  real *partial, *sums;
  int64_t rows, columns, kept, stride, rows_a_part;  // kept: columns whose sums are wanted
  int32_t parts;
  bool add;

  __device__ bool is_one_part() const { return parts == 1; }
  __device__ bool has_aligned_sums() const { return reinterpret_cast<uintptr_t>(sums) % 16 == 0; }
};

template <typename scalar>
using SummedList = std::array<Summed<scalar>, kMostColumnSums>;

template <typename scalar>
RNNT_DEVICE void store_sum(const Summed<scalar>& matrix, int64_t column, acc_type<scalar> sum) {
  matrix.sums[column] = matrix.add ? matrix.sums[column] + sum : sum;
}

// The sums of `width` columns, in accesses of 16 bytes.
template <int width, typename scalar>
RNNT_DEVICE void store_sums(const Summed<scalar>& matrix, int64_t column,
                            const acc_type<scalar> (&sum)[width]) {
  using real = acc_type<scalar>;
  constexpr int part = std::min<int>(width, 16 / sizeof(real));
#pragma unroll
  for (int begin = 0; begin < width; begin += part) {
    real* const address = matrix.sums + column + begin;
    Vector<real, part> total{};
    if (matrix.add) total = load_vector<part>(static_cast<const real*>(address));
#pragma unroll
    for (int k = 0; k < part; ++k) total.x[k] += sum[begin + k];
    store_vector<part>(address, total);
  }
}

template <bool whole, typename scalar, int width>
RNNT_DEVICE Vector<scalar, width> load_columns(const scalar* address, int64_t columns) {
  if (whole) return load_vector<width>(address);
  Vector<scalar, width> value{};
#pragma unroll
  for (int k = 0; k < width; ++k) {
    if (k < columns) value.x[k] = address[k];
  }
  return value;
}

// Adds rows begin, begin + step, ... below `end`, which have `columns` columns.
template <bool whole, int width, typename scalar>
RNNT_DEVICE void add_rows(const scalar* x, int64_t stride, int64_t begin, int64_t end, int step,
                          int64_t columns, acc_type<scalar> (&sum)[width]) {
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

// A block for each part of the rows and each tile of columns of each matrix. `across` threads, a
// power of 2, share a row; kThreads / across rows are read at a time:
//
//             columns ->
//   part 0    [tile][tile][tile]      a block sums its tile of its part; the second kernel
//   part 1    [tile][tile][tile]      adds up the parts
template <typename scalar, int width>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(SummedList<scalar> list, int across) {
  using real = acc_type<scalar>;
  __shared__ real sums[width][kThreads];
  const Summed<scalar>& matrix = list[blockIdx.z];
  const int lane = threadIdx.x & (across - 1), group = threadIdx.x / across;
  const int groups = kThreads / across;
  const int64_t first = int64_t(blockIdx.x) * across * width;
  if (blockIdx.y >= matrix.parts || first >= matrix.columns) return;
  const scalar* x = matrix.x;
  const int64_t c = first + lane * width;
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
  // A matrix of few rows has many columns.
  if (matrix.is_one_part() && c + width <= matrix.kept && matrix.has_aligned_sums()) {
    store_sums<width>(matrix, c, sum);
    return;
  }
#pragma unroll
  for (int k = 0; k < width; ++k) {
    if (c + k >= (matrix.is_one_part() ? matrix.kept : matrix.columns)) break;
    if (matrix.is_one_part()) {
      store_sum(matrix, c + k, sum[k]);
    } else {
      matrix.partial[blockIdx.y * matrix.columns + c + k] = sum[k];
    }
  }
}

// Adds up the sums of the parts.
template <typename scalar>
__global__ void __launch_bounds__(32 * kGroups) column_sums_parts_kernel(SummedList<scalar> list) {
  using real = acc_type<scalar>;
  __shared__ real sums[kGroups][33];
  const Summed<scalar>& matrix = list[blockIdx.y];
  if (matrix.is_one_part()) return;
  const int64_t C = matrix.columns;
  const real* partial = matrix.partial;
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int64_t c = int64_t(blockIdx.x) * 32 + lane;
  real sum = 0;
  if (c < C) {
#pragma unroll 16
    for (int32_t p = group; p < matrix.parts; p += kGroups) sum += partial[p * C + c];
  }
  sums[group][lane] = sum;
  __syncthreads();
  // From here on a warp has a column, and a lane one of its groups.
  sum = sums[lane][group];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  const int64_t at = int64_t(blockIdx.x) * 32 + group;
  if (lane == 0 && at < matrix.kept) store_sum(matrix, at, sum);
}

}  // namespace

void column_sums_of(const Launcher& launch, const ColumnSums* all, int count) {
  if (count == 0) return;
  dispatch_floating(all[0].x.scalar_type(), "column_sums", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    SummedList<scalar> list{};
    int widest = 16 / sizeof(scalar);
    int64_t columns = 0;
    int32_t parts = 0;
    for (int i = 0; i < count; ++i) {
      const auto& [x, partial, sums, add] = all[i];
      const int64_t R = x.size(0), P = partial.size(0);
      list[i] = {data_of<scalar>(x),
                 mutable_data_of<real>(partial),
                 mutable_data_of<real>(sums),
                 R,
                 x.size(1),
                 sums.size(0),
                 x.stride(0),
                 (R + P - 1) / P,
                 int32_t(P),
                 add};
      widest = std::min(widest, widest_vector<scalar>(x.data_ptr(), x.stride(0)));
      columns = std::max(columns, x.size(1));
      parts = std::max(parts, int32_t(P));
    }
    if (columns == 0) return;
    dispatch_width<scalar>(widest, [&](auto chosen) {
      constexpr int width = decltype(chosen)::value;
      int across = 1;
      while (across < kThreads && across * width < columns) across *= 2;
      const int64_t tile = across * width;
      launch(column_sums_kernel<scalar, width>,
             dim3(uint32_t((columns + tile - 1) / tile), parts, count), kThreads, 0, list, across);
    });
    if (parts == 1) return;
    launch(column_sums_parts_kernel<scalar>, dim3(uint32_t((columns + 31) / 32), count),
           32 * kGroups, 0, list);
  });
}

void column_sums(const Launcher& launch, const View& x, bool add, const View& partial,
                 const View& sums) {
  const ColumnSums one{x, partial, sums, add};
  column_sums_of(launch, &one, 1);
}

PRUNED_RNNT_CUDA_OP(column_sums)

}  // namespace pruned_rnnt::cuda
