// The gradient of the loss by the logits of one row. Formulas: pruned_rnnt/ops/log_probs.py.
//
// Axes: R rows, V vocabulary.
#pragma once

#include "cuda/arithmetic.cuh"
#include "cuda/logit_rows.cuh"
#include "cuda/row_cursor.cuh"
#include "cuda/symbol_table.cuh"
#include "cuda/vector_access.cuh"

namespace pruned_rnnt {
namespace cuda {

template <typename real>
struct GradientInputs {
  const real *grad_loss, *lse, *gx, *gy;
  real emit_factor, clamp;
  LogitMode mode;
};

// What the gradient of one row is made of: unit(v) of the formulas, clamped, times the incoming
// gradient of the utterance.
template <typename real>
struct RowGradient {
  real lse, emit, stay, weight, upstream, clamp;
  int32_t blank, target;
  bool used, is_hat;

  __device__ __forceinline__ RowGradient(const GradientInputs<real>& in, int64_t row,
                                         const RowCursor& node, const SymbolTable& symbols)
      : emit(in.emit_factor * in.gx[row]), stay(in.gy[row]), is_hat(in.mode == LogitMode::kHat) {
    used = node.valid() && emit + stay != 0;
    if (!used) return;
    lse = in.lse[row];
    clamp = in.clamp;
    upstream = in.grad_loss[node.n()];
    blank = symbols.blank;
    target = node.emits() ? symbols.symbol(node.n(), node.u()) : -1;
    weight = is_hat ? emit : (in.mode == LogitMode::kLogProbs ? real(0) : emit + stay);
  }

  // Whether the gradient of a common element is no more than a factor times its probability.
  __device__ __forceinline__ bool plain() const { return clamp <= 0 && weight != 0; }

  __device__ __forceinline__ real finish(real unit) const {
    if (clamp > 0) unit = unit > clamp ? clamp : (unit < -clamp ? -clamp : unit);
    return unit * upstream;
  }
  __device__ __forceinline__ real softmax_part(real logit) const {
    return weight == 0 ? real(0) : weight * exp_of(logit - lse);
  }
  __device__ __forceinline__ real at_target(real logit) const {
    return finish(softmax_part(logit) - emit);
  }
  __device__ __forceinline__ real at_blank(real logit) const {
    if (is_hat) return finish(emit * sigmoid(logit) - stay * sigmoid(-logit));
    return finish(softmax_part(logit) - stay);
  }
};

// The gradient by `width` logits from v on; 0 from V on.
template <bool plain, int width, typename scalar>
__device__ __forceinline__ Vector<scalar, width> gradient_of(
    const RowGradient<acc_type<scalar>>& row, const Vector<scalar, width>& logits, int32_t v,
    int32_t V) {
  using real = acc_type<scalar>;
  const real factor = row.weight * row.upstream;
  Vector<scalar, width> result;
#pragma unroll
  for (int i = 0; i < width; ++i) {
    const real logit = static_cast<real>(logits.x[i]);
    result.x[i] = static_cast<scalar>(plain ? factor * exp_of(logit - row.lse)
                                            : row.finish(row.softmax_part(logit)));
  }
  // At most two elements of a row are something else.
  const uint32_t target_at = static_cast<uint32_t>(row.target - v);
  const uint32_t blank_at = static_cast<uint32_t>(row.blank - v);
  if (target_at < width || blank_at < width || v + width > V) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const real logit = static_cast<real>(logits.x[i]);
      if (target_at == i) result.x[i] = static_cast<scalar>(row.at_target(logit));
      if (blank_at == i) result.x[i] = static_cast<scalar>(row.at_blank(logit));
      if (v + i >= V) result.x[i] = static_cast<scalar>(0.0f);
    }
  }
  return result;
}

}  // namespace cuda
}  // namespace pruned_rnnt
