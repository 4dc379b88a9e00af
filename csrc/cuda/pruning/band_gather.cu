// band_gather: predictor rows of the band, and the sum that is its gradient. Contract:
// pruned_rnnt/ops/pruning/band_gather.py.
//
// Axes: N batch, T frames, U symbols, S columns kept a frame, D joiner dim.
#include "contracts/pruning.h"
#include "cuda/common/band_frames.cuh"
#include "cuda/common/device_op.cuh"
#include "cuda/common/vector_access.cuh"
#include "fast_divmod.h"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsEach = 4;

struct GatherSizes {
  int64_t rows;     // N T S
  int32_t width;    // U + 1
  int32_t vectors;  // of a row of D elements
  FastDivmod by_vectors, by_columns, by_frames;
};

// A block takes whole rows, so that its indices fit 32 bits.
template <typename scalar, int width>
__global__ void __launch_bounds__(kThreads)
    band_gather_kernel(GatherSizes sizes, int32_t rows_a_block, const scalar* __restrict__ lm,
                       const int32_t* __restrict__ start, scalar* __restrict__ out) {
  const int64_t first_row = int64_t(blockIdx.x) * rows_a_block;
  const uint32_t rows = uint32_t(min(int64_t(rows_a_block), sizes.rows - first_row));
  const uint32_t count = rows * sizes.vectors;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const Division in_row = sizes.by_vectors.divmod(i);
    const int64_t row = first_row + in_row.quotient;
    // Rows are counted in frames of S, and those fit 32 bits (int32 elements of start).
    const Division in_frame = row <= 0xffffffffll
                                  ? sizes.by_columns.divmod(uint32_t(row))
                                  : Division{uint32_t(row / sizes.by_columns.divisor()),
                                             uint32_t(row % sizes.by_columns.divisor())};
    const uint32_t n = sizes.by_frames.divide(in_frame.quotient);
    const int32_t u = start[in_frame.quotient] + int32_t(in_frame.remainder);
    const int64_t d = int64_t(in_row.remainder) * width;
    const int64_t D = int64_t(sizes.vectors) * width;
    scalar* target = out + row * D + d;
    if (u >= 0 && u < sizes.width) {
      const int64_t source = (int64_t(n) * sizes.width + u) * D + d;
      store_vector<width>(target, load_vector<width>(lm + source));
    } else {
      store_zeros<width>(target);
    }
  }
}

void band_gather(const Launcher& launch, const View& lm, const View& start, int64_t s_range,
                 const View& out) {
  const int64_t N = start.size(0), T = start.size(1), D = lm.size(2);
  if (out.numel() == 0) return;
  dispatch_floating(lm.scalar_type(), "band_gather", [&](auto zero) {
    using scalar = decltype(zero);
    const int widest =
        std::min(widest_vector<scalar>(lm.data_ptr(), D), widest_vector<scalar>(out.data_ptr(), D));
    dispatch_width<scalar>(widest, [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      const int64_t vectors = D / width;
      const GatherSizes sizes{N * T * s_range,
                              int32_t(lm.size(1)),
                              int32_t(vectors),
                              FastDivmod(uint32_t(vectors)),
                              FastDivmod(uint32_t(s_range)),
                              FastDivmod(uint32_t(T))};
      const int64_t rows_a_block = std::max<int64_t>(1, kThreads * kVectorsEach / vectors);
      launch(band_gather_kernel<scalar, width>,
             uint32_t((sizes.rows + rows_a_block - 1) / rows_a_block), kThreads, 0, sizes,
             int32_t(rows_a_block), data_of<scalar>(lm), data_of<int32_t>(start),
             mutable_data_of<scalar>(out));
    });
  });
}

// A warp for each (n,u) and each piece of 32 vectors of its row.
template <typename scalar, int width>
__global__ void __launch_bounds__(kThreads)
    band_gather_backward_kernel(int64_t rows, int32_t T, int32_t S, int32_t columns, int32_t pieces,
                                int32_t D, const scalar* __restrict__ grad,
                                const int32_t* __restrict__ start, scalar* __restrict__ grad_lm) {
  using real = acc_type<scalar>;
  const int64_t task = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int64_t row = task / pieces;
  if (row >= rows) return;
  const int32_t d = (int32_t(task - row * pieces) * 32 + threadIdx.x % 32) * width;
  const int64_t n = row / columns;
  const int32_t u = int32_t(row - n * columns);
  const int32_t* start_n = start + n * T;
  real sum[width] = {};
  for_frames_with(start_n, S, u, 0, T, [&](int32_t t) {
    if (d >= D) return;
    const int64_t at = (n * T + t) * S + (u - start_n[t]);
    const Vector<scalar, width> x = load_vector<width>(grad + at * D + d);
#pragma unroll
    for (int i = 0; i < width; ++i) sum[i] += static_cast<real>(x.x[i]);
  });
  if (d >= D) return;
  Vector<scalar, width> result;
#pragma unroll
  for (int i = 0; i < width; ++i) result.x[i] = static_cast<scalar>(sum[i]);
  store_vector<width>(grad_lm + row * D + d, result);
}

void band_gather_backward(const Launcher& launch, const View& grad, const View& start,
                          const View& grad_lm) {
  const int64_t T = start.size(1), S = grad.size(2), D = grad.size(3);
  const int64_t columns = grad_lm.size(1), rows = grad_lm.size(0) * columns;
  if (grad_lm.numel() == 0) return;
  dispatch_floating(grad.scalar_type(), "band_gather_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const int widest = std::min(widest_vector<scalar>(grad.data_ptr(), D),
                                widest_vector<scalar>(grad_lm.data_ptr(), D));
    dispatch_width<scalar>(widest, [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      const int64_t pieces = (D / width + 31) / 32;
      const int64_t blocks = (rows * pieces + kThreads / 32 - 1) / (kThreads / 32);
      launch(band_gather_backward_kernel<scalar, width>, uint32_t(blocks), kThreads, 0, rows,
             int32_t(T), int32_t(S), int32_t(columns), int32_t(pieces), int32_t(D),
             data_of<scalar>(grad), data_of<int32_t>(start), mutable_data_of<scalar>(grad_lm));
    });
  });
}

}  // namespace

PRUNED_RNNT_CUDA_OP(band_gather)
PRUNED_RNNT_CUDA_OP(band_gather_backward)

}  // namespace pruned_rnnt::cuda
