// joiner_rows: hidden rows of the joiner, act(am(n,t) + lm(n,u)), and the sums over rows that are
// its gradient. Contract: pruned_rnnt/ops/joiner_rows.py.
//
// Axes: N batch, T frames, U symbols, D joiner dim, r rows of the chunk.
#include "cuda/band_frames.cuh"
#include "cuda/row_cursor.cuh"
#include "cuda/vector_access.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

enum class Activation : int64_t { kNone = 0, kTanh = 1, kRelu = 2 };

template <Activation activation, typename scalar>
__device__ __forceinline__ acc_type<scalar> activated(acc_type<scalar> x) {
  using real = acc_type<scalar>;
  if (activation == Activation::kRelu) return x < 0 ? real(0) : x;
  if (activation == Activation::kNone) return x;
  if constexpr (std::is_same_v<scalar, BFloat16>) return approximate_tanh(x);
  return tanh(x);
}

// grad d act(x) / dx, by the activated value.
template <Activation activation, typename real>
__device__ __forceinline__ real through_activation(real grad, real value) {
  if (activation == Activation::kTanh) return grad * (1 - value * value);
  if (activation == Activation::kRelu) return value > 0 ? grad : real(0);
  return grad;
}

template <typename Work>
void dispatch_activation(int64_t activation, Work&& work) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kNone:
      return work(std::integral_constant<Activation, Activation::kNone>());
    case Activation::kTanh:
      return work(std::integral_constant<Activation, Activation::kTanh>());
    case Activation::kRelu:
      return work(std::integral_constant<Activation, Activation::kRelu>());
    default:
      STD_TORCH_CHECK(false, "joiner_rows has no activation of number ", activation);
  }
}

// A warp for each row; a block's warps take rows side by side, rows_each one after the other.
template <typename scalar, Activation activation, int width>
__global__ void __launch_bounds__(kThreads)
    joiner_rows_kernel(RowGeometry geometry, int64_t row_begin, int64_t rows, int32_t rows_each,
                       int32_t frames, int32_t columns, int32_t D, const scalar* __restrict__ am,
                       const scalar* __restrict__ lm, scalar* __restrict__ hidden) {
  using real = acc_type<scalar>;
  const int lane = threadIdx.x % 32;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps * rows_each + threadIdx.x / 32;
  if (row >= rows) return;
  RowCursor node(geometry, row_begin + row);
  for (int i = 0; i < rows_each; ++i) {
    scalar* target = hidden + row * D;
    if (node.valid() && node.t() < frames) {
      const scalar* a = am + (static_cast<int64_t>(node.n()) * frames + node.t()) * D;
      const scalar* b = lm + (static_cast<int64_t>(node.n()) * columns + node.u()) * D;
#pragma unroll 2
      for (int32_t d = lane * width; d < D; d += 32 * width) {
        const Vector<scalar, width> x = load_vector<width>(a + d);
        const Vector<scalar, width> y = load_vector<width>(b + d);
        Vector<scalar, width> result;
#pragma unroll
        for (int k = 0; k < width; ++k) {
          const real sum = static_cast<real>(x.x[k]) + static_cast<real>(y.x[k]);
          result.x[k] = static_cast<scalar>(activated<activation, scalar>(sum));
        }
        store_vector<width>(target + d, result);
      }
    } else {
      for (int32_t d = lane * width; d < D; d += 32 * width) store_zeros<width>(target + d);
    }
    row += kWarps;
    if (row >= rows) return;
    node.advance(kWarps);
  }
}

void joiner_rows(const Tensor& am, const Tensor& lm, const Tensor& logit_lengths,
                 const Tensor& target_lengths, const OptionalTensor& start,
                 const OptionalTensor& row_splits, int64_t T, int64_t S, int64_t row_begin,
                 int64_t activation, const Tensor& hidden) {
  const int64_t rows = hidden.size(0), D = hidden.size(1);
  if (rows == 0) return;
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             lm.size(1) - 1);
  const Launcher launch(am);
  dispatch_floating(am.scalar_type(), "joiner_rows", [&](auto zero) {
    using scalar = decltype(zero);
    const int widest =
        std::min({widest_vector<scalar>(am.data_ptr(), D), widest_vector<scalar>(lm.data_ptr(), D),
                  widest_vector<scalar>(hidden.data_ptr(), D)});
    const int32_t rows_each = rows > 16384 ? 4 : 1;
    const int64_t blocks = (rows + kWarps * rows_each - 1) / (kWarps * rows_each);
    dispatch_width<scalar>(widest, [&](auto width) {
      dispatch_activation(activation, [&](auto kind) {
        launch(joiner_rows_kernel<scalar, decltype(kind)::value, decltype(width)::value>,
               static_cast<uint32_t>(blocks), kThreads, 0, geometry, row_begin, rows, rows_each,
               static_cast<int32_t>(am.size(1)), static_cast<int32_t>(lm.size(1)),
               static_cast<int32_t>(D), data_of<scalar>(am), data_of<scalar>(lm),
               mutable_data_of<scalar>(hidden));
      });
    });
  });
}

// Sizes of a backward pass. Its first blocks have a warp for each frame of the chunk and each piece
// of 32 vectors of D; then there is a block for each (n,u) and piece.
struct BackwardSizes {
  int64_t row_begin, rows;
  int64_t frame_tasks;  // rows that may begin a frame: every frame_rows-th
  int64_t frame_blocks;
  int32_t frame_rows;
  int32_t frames, columns;  // of am and lm
  int32_t D, pieces;
};

// Adds the gradient that reaches the joiner's input through `row` of the chunk.
template <Activation activation, int width, typename scalar>
__device__ __forceinline__ void add_row(const scalar* grad, const scalar* hidden, int64_t offset,
                                        acc_type<scalar> (&sum)[width]) {
  using real = acc_type<scalar>;
  const Vector<scalar, width> g = load_vector<width>(grad + offset);
  const Vector<scalar, width> h = load_vector<width>(hidden + offset);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    sum[k] += through_activation<activation>(static_cast<real>(g.x[k]), static_cast<real>(h.x[k]));
  }
}

// d am of a frame: the sum over its columns, by a warp.
template <typename scalar, Activation activation, int width>
__device__ void frame_gradient(const RowGeometry& geometry, const BackwardSizes& sizes,
                               const scalar* grad, const scalar* hidden,
                               acc_type<scalar>* grad_am) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t task = warp / sizes.pieces;
  const int32_t piece = static_cast<int32_t>(warp - task * sizes.pieces), D = sizes.D;
  const int32_t d = (piece * 32 + threadIdx.x % 32) * width;
  if (task >= sizes.frame_tasks || d >= D) return;
  const int64_t row = task * sizes.frame_rows;
  const RowCursor cursor(geometry, sizes.row_begin + row);
  const BandNode first = cursor.node();
  if (first.column != 0 || first.t >= sizes.frames) return;
  acc_type<scalar> sum[width] = {};
  if (first.t < first.frames) {
    const int32_t begin = max(0, -first.u);
    const int32_t end = min(first.width, first.symbols + 1 - first.u);
#pragma unroll 4
    for (int32_t j = begin; j < end; ++j) {
      add_row<activation, width>(grad, hidden, (row + j) * D + d, sum);
    }
  }
  const int64_t frame = static_cast<int64_t>(cursor.n()) * sizes.frames + first.t;
#pragma unroll
  for (int k = 0; k < width; ++k) grad_am[frame * D + d + k] = sum[k];
}

// d lm of a symbol position: the sum over the chunk's frames that keep it. Frames go round the
// warps of the block, so that a position that stays in the band for long is no one's alone.
template <typename scalar, Activation activation, int width>
__device__ void position_gradient(const RowGeometry& geometry, const BackwardSizes& sizes,
                                  const scalar* grad, const scalar* hidden,
                                  acc_type<scalar>* grad_lm) {
  using real = acc_type<scalar>;
  __shared__ real sums[kWarps][32 * width];
  const int64_t task = blockIdx.x - sizes.frame_blocks;
  const int64_t position = task / sizes.pieces;
  const int32_t piece = static_cast<int32_t>(task - position * sizes.pieces), D = sizes.D;
  const int32_t n = static_cast<int32_t>(position / sizes.columns);
  const int32_t u = static_cast<int32_t>(position - static_cast<int64_t>(n) * sizes.columns);
  const int32_t frames = min(geometry.frames_of(n), sizes.frames);
  const int64_t W = geometry.width_of(n), first = geometry.first_row_of(n);
  const int64_t chunk_first = max(int64_t(0), (sizes.row_begin - first + W - 1) / W);
  const int64_t chunk_end = (sizes.row_begin + sizes.rows - first) / W;
  const int32_t t_begin = static_cast<int32_t>(min(chunk_first, int64_t(frames)));
  const int32_t t_end = static_cast<int32_t>(max(int64_t(0), min(chunk_end, int64_t(frames))));
  if (u > geometry.target_lengths[n] || t_begin >= t_end) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t d = (piece * 32 + lane) * width;
  const int64_t base = first - sizes.row_begin;
  real sum[width] = {};
  if (geometry.start == nullptr) {
    if (d < D) {
#pragma unroll 4
      for (int32_t t = t_begin + warp; t < t_end; t += kWarps) {
        add_row<activation, width>(grad, hidden, (base + t * W + u) * D + d, sum);
      }
    }
  } else {
    const int32_t* start = geometry.start + static_cast<int64_t>(n) * geometry.T;
    int seen = 0;
    for_frames_with(start, geometry.S, u, t_begin, t_end, [&](int32_t t) {
      if (seen++ % kWarps != warp || d >= D) return;
      add_row<activation, width>(grad, hidden, (base + t * W + u - start[t]) * D + d, sum);
    });
  }
#pragma unroll
  for (int k = 0; k < width; ++k) sums[warp][lane * width + k] = sum[k];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * width; i += kThreads) {
    const int32_t at = piece * 32 * width + i;
    if (at >= D) return;
    real total = 0;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) total += sums[from][i];
    grad_lm[position * D + at] += total;
  }
}

template <typename scalar, Activation activation, int width>
__global__ void __launch_bounds__(kThreads)
    joiner_rows_backward_kernel(RowGeometry geometry, BackwardSizes sizes,
                                const scalar* __restrict__ grad, const scalar* __restrict__ hidden,
                                acc_type<scalar>* __restrict__ grad_am,
                                acc_type<scalar>* __restrict__ grad_lm) {
  if (blockIdx.x < sizes.frame_blocks) {
    frame_gradient<scalar, activation, width>(geometry, sizes, grad, hidden, grad_am);
  } else {
    position_gradient<scalar, activation, width>(geometry, sizes, grad, hidden, grad_lm);
  }
}

void joiner_rows_backward(const Tensor& grad_hidden, const Tensor& hidden,
                          const Tensor& logit_lengths, const Tensor& target_lengths,
                          const OptionalTensor& start, const OptionalTensor& row_splits, int64_t T,
                          int64_t S, int64_t row_begin, int64_t activation, const Tensor& grad_am,
                          const Tensor& grad_lm) {
  const int64_t rows = hidden.size(0), D = hidden.size(1);
  const int64_t N = grad_lm.size(0), frames = grad_am.size(1), columns = grad_lm.size(1);
  if (rows == 0) return;
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S, columns - 1);
  const Launcher launch(hidden);
  dispatch_floating(hidden.scalar_type(), "joiner_rows_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const int widest = std::min(widest_vector<scalar>(grad_hidden.data_ptr(), D),
                                widest_vector<scalar>(hidden.data_ptr(), D));
    dispatch_width<scalar>(widest, [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      BackwardSizes sizes{};
      sizes.row_begin = row_begin;
      sizes.rows = rows;
      // Only frames of packed whole lattices differ in width.
      const bool ragged = row_splits.has_value() && !start.has_value();
      sizes.frame_rows = static_cast<int32_t>(ragged ? 1 : S);
      sizes.frame_tasks = rows / sizes.frame_rows;
      sizes.frames = static_cast<int32_t>(frames);
      sizes.columns = static_cast<int32_t>(columns);
      sizes.D = static_cast<int32_t>(D);
      sizes.pieces = static_cast<int32_t>((D / width + 31) / 32);
      sizes.frame_blocks = (sizes.frame_tasks * sizes.pieces + kWarps - 1) / kWarps;
      const int64_t blocks = sizes.frame_blocks + N * columns * sizes.pieces;
      dispatch_activation(activation, [&](auto kind) {
        launch(joiner_rows_backward_kernel<scalar, decltype(kind)::value, width>,
               static_cast<uint32_t>(blocks), kThreads, 0, geometry, sizes,
               data_of<scalar>(grad_hidden), data_of<scalar>(hidden),
               mutable_data_of<real>(grad_am), mutable_data_of<real>(grad_lm));
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("joiner_rows", TORCH_BOX(&joiner_rows));
  m.impl("joiner_rows_backward", TORCH_BOX(&joiner_rows_backward));
}

}  // namespace cuda
}  // namespace pruned_rnnt
