// simple_product, simple_sums: matrix products of the trivial joiner's exponentials and of their
// parts. Formulas and contracts: pruned_rnnt/ops/simple/simple_products.py.
//
// Axes: N batch, T frames, U' and V' padded symbols and vocabulary.
#include "contracts/simple.h"
#include "cuda/common/ops.cuh"

namespace pruned_rnnt::cuda {
namespace {

// Matrices (N,rows,columns), from the `shift`-th column on.
Matrix batched(const View& x, int64_t columns, int64_t shift = 0) {
  Matrix matrix{x.data_ptr(), x.scalar_type(), columns};
  matrix.batch_stride = x.size(0) > 0 ? x.numel() / x.size(0) : 0;
  matrix.data = static_cast<char*>(matrix.data) + shift * element_bytes(matrix.type);
  return matrix;
}

}  // namespace

void simple_product(const Launcher& launch, const View& am_exp, const OptionalView& am_low,
                    const View& lm_exp, const OptionalView& lm_low, const View& product) {
  if (product.numel() == 0) return;
  const int64_t N = am_exp.size(0), T = am_exp.size(1), V = am_exp.size(2), W = lm_exp.size(1);
  const Matrix out = batched(product, W), am = batched(am_exp, V), lm = batched(lm_exp, V);
  launch.blas().multiply(out, am, lm.t(), T, W, V, false, N);
  if (!am_low.has_value() || !lm_low.has_value()) return;
  launch.blas().multiply(out, am, batched(*lm_low, V).t(), T, W, V, true, N);
  launch.blas().multiply(out, batched(*am_low, V), lm.t(), T, W, V, true, N);
}

void simple_sums(const Launcher& launch, const View& weights, const View& am_exp,
                 const OptionalView& am_low, const View& lm_exp, const OptionalView& lm_low,
                 const OptionalView& lm_stack, const View& am_sum, const View& lm_sum) {
  if (weights.numel() == 0) return;
  const int64_t N = am_exp.size(0), T = am_exp.size(1), V = am_exp.size(2), W = lm_exp.size(1);
  const int64_t width = weights.size(2) * W;
  const Matrix high = batched(weights, width), am = batched(am_exp, V);
  const Matrix am_out = batched(am_sum, V), lm_out = batched(lm_sum, V);
  launch.blas().multiply(lm_out, high.t(), am, W, V, T, false, N);
  if (weights.size(2) == 1) {
    launch.blas().multiply(am_out, high, batched(lm_exp, V), T, V, W, false, N);
    return;
  }
  // Stacks high, low, high, to multiply high, high, low of the weights in one product.
  const size_t part = W * V * sizeof(uint16_t);
  char* stack = static_cast<char*>(lm_stack->data_ptr());
  for (int i = 0; i < 3; ++i) {
    const View& source = i == 1 ? *lm_low : lm_exp;
    check(cudaMemcpy2DAsync(stack + i * part, 3 * part, source.data_ptr(), part, part, N,
                            cudaMemcpyDeviceToDevice, launch.stream()),
          "stacking parts");
  }
  launch.blas().multiply(am_out, high, batched(*lm_stack, V), T, V, width, false, N);
  launch.blas().multiply(lm_out, high.t(), batched(*am_low, V), W, V, T, true, N);
  launch.blas().multiply(lm_out, batched(weights, width, 2 * W).t(), am, W, V, T, true, N);
}

PRUNED_RNNT_CUDA_OP(simple_product)
PRUNED_RNNT_CUDA_OP(simple_sums)

}  // namespace pruned_rnnt::cuda
