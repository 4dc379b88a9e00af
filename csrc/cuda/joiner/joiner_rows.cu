// joiner_rows: hidden rows of the joiner, act(am(n,t) + lm(n,u)). Contract:
// pruned_rnnt/ops/joiner/joiner_rows.py.
//
// Axes: N batch, T frames, U symbols, D joiner dim, r rows of the chunk.
#include "cuda/common/ops.cuh"
#include "cuda/common/vector_access.cuh"
#include "cuda/joiner/joiner_activation.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// am or lm: `rows` rows of each utterance, `pitch` elements apart.
template <typename scalar>
struct PitchedInput {
  explicit PitchedInput(const View& view)
      : data(data_of<scalar>(view)), pitch(row_pitch(view)), rows(int32_t(view.size(1))) {}

  RNNT_DEVICE const scalar* row(int32_t n, int32_t i) const {
    return data + (int64_t(n) * rows + i) * pitch;
  }

  const scalar* __restrict__ data;
  int64_t pitch;
  int32_t rows;
};

// A warp computes a row. The warps of a block take adjacent rows, rows_each times.
template <typename scalar, Activation activation, int width>
__global__ void __launch_bounds__(kThreads)
    joiner_rows_kernel(RowGeometry geometry, int64_t row_begin, int64_t rows, int32_t rows_each,
                       int32_t D, const PitchedInput<scalar> am, const PitchedInput<scalar> lm,
                       scalar* __restrict__ hidden) {
  using real = acc_type<scalar>;
  const int lane = threadIdx.x % 32;
  int64_t row = int64_t(blockIdx.x) * kWarps * rows_each + threadIdx.x / 32;
  if (row >= rows) return;
  RowCursor node(geometry, row_begin + row);
  for (int i = 0; i < rows_each; ++i) {
    scalar* target = hidden + row * D;
    if (node.valid() && node.t() < am.rows) {
      const scalar* a = am.row(node.n(), node.t());
      const scalar* b = lm.row(node.n(), node.u());
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

}  // namespace

void joiner_rows(const Launcher& launch, const View& am, const View& lm, const View& logit_lengths,
                 const View& target_lengths, const OptionalView& start,
                 const OptionalView& row_splits, int64_t T, int64_t S, int64_t row_begin,
                 int64_t activation, const View& hidden) {
  const int64_t rows = hidden.size(0), D = hidden.size(1);
  if (rows == 0) return;
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             lm.size(1) - 1);
  dispatch_floating(am.scalar_type(), "joiner_rows", [&](auto zero) {
    using scalar = decltype(zero);
    int widest = widest_vector<scalar>(hidden.data_ptr(), D);
    for (const View* input : {&am, &lm}) {
      widest = std::min(widest, widest_vector<scalar>(input->data_ptr(), row_pitch(*input)));
    }
    const int32_t rows_each = rows > 16384 ? 4 : 1;
    const int64_t blocks = (rows + kWarps * rows_each - 1) / (kWarps * rows_each);
    dispatch_width<scalar>(widest, [&](auto width) {
      dispatch_activation(activation, [&](auto kind) {
        launch(joiner_rows_kernel<scalar, decltype(kind)::value, decltype(width)::value>,
               uint32_t(blocks), kThreads, 0, geometry, row_begin, rows, rows_each, int32_t(D),
               PitchedInput<scalar>(am), PitchedInput<scalar>(lm), mutable_data_of<scalar>(hidden));
      });
    });
  });
}

PRUNED_RNNT_CUDA_OP(joiner_rows)

}  // namespace pruned_rnnt::cuda
