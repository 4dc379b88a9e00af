// joiner_rows: hidden rows of the joiner, act(am(n,t) + lm(n,u)). Contract:
// pruned_rnnt/ops/joiner/joiner_rows.py.
//
// Axes: N batch, T frames, U symbols, D joiner dim, r rows of the chunk.
#include "contracts/rows.h"
#include "cuda/common/ops.cuh"
#include "cuda/joiner/hidden_row.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Warps that fill a large device, about.
constexpr int64_t kManyWarps = 8448;

// A warp computes rows_each adjacent rows, at most 32.
template <typename scalar, Activation activation, int width>
__global__ void __launch_bounds__(kThreads)
    joiner_rows_kernel(RowGeometry geometry, int64_t row_begin, int64_t rows, int32_t rows_each,
                       int32_t D, const PitchedInput<scalar> am, const PitchedInput<scalar> lm,
                       scalar* __restrict__ hidden) {
  const int64_t first = (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * rows_each;
  if (first >= rows || row_begin + first >= geometry.rows()) return;
  const int count = int(min(int64_t(rows_each), rows - first));
  const int lane = min(int(threadIdx.x % 32), count - 1);
  const RowCursor node(geometry, row_begin + first + lane);
  const bool exists = node.valid() && node.t() < am.rows;
  write_hidden_rows<activation, width>(am, lm, exists ? am.row(node.n(), node.t()) : -1,
                                       exists ? lm.row(node.n(), node.u()) : 0, count, D,
                                       hidden + first * D, D);
}

}  // namespace

void joiner_rows(const Launcher& launch, const View& am, const View& lm, const LatticeRows& lattice,
                 int64_t row_begin, int64_t activation, const View& hidden) {
  const int64_t rows = hidden.size(0), D = hidden.size(1);
  if (rows == 0) return;
  const RowGeometry geometry(lattice, lm.size(1) - 1);
  dispatch_floating(am.scalar_type(), "joiner_rows", [&](auto zero) {
    using scalar = decltype(zero);
    int widest = widest_vector<scalar>(hidden.data_ptr(), D);
    for (const View* input : {&am, &lm}) {
      widest = std::min(widest, widest_vector<scalar>(input->data_ptr(), row_pitch(*input)));
    }
    const int32_t rows_each = int32_t(std::clamp<int64_t>(rows / kManyWarps, 4, 32));
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
