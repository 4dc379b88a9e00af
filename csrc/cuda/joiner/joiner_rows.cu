// joiner_rows: hidden rows of the joiner, act(am(n,t) + lm(n,u)). Contract:
// pruned_rnnt/ops/joiner/joiner_rows.py.
//
// Axes: N batch, T frames, U symbols, D joiner dim, r rows of the chunk.
#include "cuda/common/ops.cuh"
#include "cuda/joiner/hidden_row.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A warp computes a row. The warps of a block take adjacent rows, rows_each times.
template <typename scalar, Activation activation, int width>
__global__ void __launch_bounds__(kThreads)
    joiner_rows_kernel(RowGeometry geometry, int64_t row_begin, int64_t rows, int32_t rows_each,
                       int32_t D, const PitchedInput<scalar> am, const PitchedInput<scalar> lm,
                       scalar* __restrict__ hidden) {
  const int lane = threadIdx.x % 32;
  int64_t row = int64_t(blockIdx.x) * kWarps * rows_each + threadIdx.x / 32;
  if (row >= rows) return;
  RowCursor node(geometry, row_begin + row);
  for (int i = 0; i < rows_each; ++i) {
    scalar* target = hidden + row * D;
    if (node.valid() && node.t() < am.rows) {
      const scalar* a = am.row(node.n(), node.t());
      const scalar* b = lm.row(node.n(), node.u());
      write_hidden_row<activation, width>(a, b, D, lane, target);
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
