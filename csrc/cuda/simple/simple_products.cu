// simple_product, simple_sums: matrix products of the trivial joiner's exponentials and of their
// parts. Formulas and contracts: pruned_rnnt/ops/simple/simple_products.py.
//
// Axes: N batch, P parts, T frames, U' and V' padded symbols and vocabulary.
#include "contracts/simple.h"
#include "cuda/common/ops.cuh"

namespace pruned_rnnt::cuda {
namespace {

// Of (N,...), the matrices with so many columns that begin `first` elements behind each utterance.
Matrix batched(const View& x, int64_t columns, int64_t first = 0) {
  Matrix matrix{x.data_ptr(), x.scalar_type(), columns};
  matrix.batch_stride = x.size(0) > 0 ? x.numel() / x.size(0) : 0;
  matrix.data = static_cast<char*>(matrix.data) + first * element_bytes(matrix.type);
  return matrix;
}

}  // namespace

void simple_product(const Launcher& launch, const View& am_exp, const View& lm_exp,
                    const View& product) {
  if (product.numel() == 0) return;
  const int64_t N = am_exp.size(0), T = am_exp.size(2), V = am_exp.size(3), W = lm_exp.size(2);
  const Matrix out = batched(product, W), am = batched(am_exp, V), lm = batched(lm_exp, V);
  launch.blas().multiply(out, am, lm.t(), T, W, V, false, N);
  if (am_exp.size(1) == 1) return;
  launch.blas().multiply(out, am, batched(lm_exp, V, W * V).t(), T, W, V, true, N);
  launch.blas().multiply(out, batched(am_exp, V, T * V), lm.t(), T, W, V, true, N);
}

void simple_sums(const Launcher& launch, const View& weights, const View& am_exp,
                 const View& lm_exp, const View& lm_sum, const View& am_sum) {
  if (weights.numel() == 0) return;
  const int64_t N = am_exp.size(0), T = am_exp.size(2), V = am_exp.size(3), W = lm_exp.size(2);
  // High, high, low of a frame's weights are beside each other, high, low, high of lm below each
  // other.
  const int64_t width = weights.size(2) * W;
  const Matrix all = batched(weights, width), am = batched(am_exp, V);
  const Matrix lm_out = batched(lm_sum, V);
  launch.blas().multiply(lm_out, all.t(), am, W, V, T, false, N);
  if (am_exp.size(1) == 2) {
    launch.blas().multiply(lm_out, all.t(), batched(am_exp, V, T * V), W, V, T, true, N);
    launch.blas().multiply(lm_out, batched(weights, width, 2 * W).t(), am, W, V, T, true, N);
  }
  launch.blas().multiply(batched(am_sum, V), all, batched(lm_exp, V), T, V, width, false, N);
}

PRUNED_RNNT_CUDA_OP(simple_product)
PRUNED_RNNT_CUDA_OP(simple_sums)

}  // namespace pruned_rnnt::cuda
