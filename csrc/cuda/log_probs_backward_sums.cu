// The gradient by the logits, as in log_probs_backward.cu, and on the way the sums of its columns,
// which are the gradient of the output layer's bias: to read it again would take half as long.
//
// Axes: R rows, V vocabulary, C columns: V and padding, P parts of the rows.
#include "cuda/ops.cuh"
#include "cuda/row_gradient.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

// Vectors of a row that a lane has: their columns are summed in registers.
constexpr int kVectors = 4;
// Blocks, each of which has a part of the sums.
constexpr int64_t kMostParts = 1024;

template <typename scalar>
constexpr int kWidth = 16 / sizeof(scalar);

template <bool plain, int lanes, typename scalar>
__device__ __forceinline__ void write_and_sum(const RowGradient<acc_type<scalar>>& unit,
                                              scalar* row, int32_t V, int32_t columns, int lane,
                                              acc_type<scalar> (&sum)[kVectors][kWidth<scalar>]) {
  constexpr int width = kWidth<scalar>;
  Vector<scalar, width> loaded[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int32_t v = (k * lanes + lane) * width;
    if (v < V) loaded[k] = load_vector<width>(row + v);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int32_t v = (k * lanes + lane) * width;
    if (v >= columns) break;
    const Vector<scalar, width> gradient = gradient_of<plain>(unit, loaded[k], v, V);
    store_vector<width>(row + v, gradient);
#pragma unroll
    for (int i = 0; i < width; ++i) sum[k][i] += static_cast<acc_type<scalar>>(gradient.x[i]);
  }
}

// In place. A group of lanes takes rows one after the other, and always the same columns.
template <typename scalar, int lanes>
__global__ void __launch_bounds__(kRowThreads)
    gradient_and_sums_kernel(RowGeometry geometry, SymbolTable symbols, RowRange range,
                             GradientInputs<acc_type<scalar>> in, scalar* rows, int32_t columns,
                             acc_type<scalar>* __restrict__ partial) {
  using real = acc_type<scalar>;
  constexpr int width = kWidth<scalar>, groups = kRowThreads / lanes;
  const int lane = threadIdx.x % lanes;
  real sum[kVectors][width] = {};
  int64_t row = range.first_row<lanes>();
  if (row < range.count) {
    RowCursor node(geometry, range.begin + row);
    for (int step = 1;; ++step) {
      scalar* const x = rows + row * columns;
      const RowGradient<real> unit(in, range.begin + row, node, symbols);
      if (!unit.used) {
        for (int32_t v = lane * width; v < columns; v += lanes * width) store_zeros<width>(x + v);
      } else if (unit.plain()) {
        write_and_sum<true, lanes>(unit, x, symbols.V, columns, lane, sum);
      } else {
        write_and_sum<false, lanes>(unit, x, symbols.V, columns, lane, sum);
      }
      row += groups;
      if (step == range.rows_each || row >= range.count) break;
      node.advance(groups);
    }
  }
  partial += static_cast<int64_t>(blockIdx.x) * columns;
  __shared__ real shared[kRowThreads * width];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int32_t v = (k * lanes + lane) * width;
    if (groups > 1) {
#pragma unroll
      for (int i = 0; i < width; ++i) shared[threadIdx.x * width + i] = sum[k][i];
      __syncthreads();
      // A thread for each column of the group's vectors.
      for (int c = threadIdx.x; c < lanes * width; c += kRowThreads) {
        real total = 0;
        for (int g = 0; g < groups; ++g) total += shared[g * lanes * width + c];
        const int32_t column = k * lanes * width + c;
        if (column < columns) partial[column] = total;
      }
      __syncthreads();
    } else if (v < columns) {
#pragma unroll
      for (int i = 0; i < width; ++i) partial[v + i] = sum[k][i];
    }
  }
}

template <int lanes>
RowRange summed_range(int64_t begin, int64_t count) {
  const int64_t all = (count + kRowThreads / lanes - 1) / (kRowThreads / lanes);
  return {begin, count, static_cast<int32_t>((all + kMostParts - 1) / kMostParts)};
}

}  // namespace

int64_t gradient_sum_parts(ScalarType type, int64_t rows, int64_t columns) {
  const int64_t widest = kRowThreads * kVectors * (16 / element_bytes(type));
  // Rows that a thread takes whole have a kernel that is faster for them.
  const bool is_short = columns * element_bytes(type) <= 256;
  return is_short || columns > widest ? 0 : std::min(rows, kMostParts);
}

int64_t log_probs_backward_sums(const Launcher& launch, const View& grad_loss, const View& logits,
                                int64_t V, const View& lse, const View& gx, const View& gy,
                                const View& targets, const View& logit_lengths,
                                const View& target_lengths, const View& start,
                                const OptionalView& row_splits, int64_t T, int64_t S,
                                int64_t row_begin, int64_t blank, int64_t mode,
                                double fastemit_lambda, double clamp, const View& partial) {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             targets.size(1));
  const SymbolTable symbols(targets, V, blank);
  int64_t parts = 0;
  dispatch_floating(logits.scalar_type(), "log_probs_backward_sums", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const GradientInputs<real> in{data_of<real>(grad_loss),
                                  data_of<real>(lse),
                                  data_of<real>(gx),
                                  data_of<real>(gy),
                                  static_cast<real>(1 + fastemit_lambda),
                                  static_cast<real>(clamp),
                                  static_cast<LogitMode>(mode)};
    const auto run = [&](auto lanes_constant) {
      constexpr int lanes = decltype(lanes_constant)::value;
      const RowRange range = summed_range<lanes>(row_begin, rows);
      parts = range.blocks<lanes>();
      launch(gradient_and_sums_kernel<scalar, lanes>, static_cast<uint32_t>(parts), kRowThreads, 0,
             geometry, symbols, range, in, mutable_data_of<scalar>(logits),
             static_cast<int32_t>(columns), mutable_data_of<real>(partial));
    };
    if (columns <= 32 * kVectors * kWidth<scalar>) {
      run(std::integral_constant<int, 32>());
    } else {
      run(std::integral_constant<int, kRowThreads>());
    }
  });
  return parts;
}

}  // namespace cuda
}  // namespace pruned_rnnt
