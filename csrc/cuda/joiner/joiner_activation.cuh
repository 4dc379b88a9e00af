// The joiner's activations and their derivatives.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/packed_pair.cuh"
#include "joiner_options.h"

namespace pruned_rnnt::cuda {

template <Activation activation, typename scalar>
RNNT_DEVICE acc_type<scalar> activated(acc_type<scalar> x) {
  using real = acc_type<scalar>;
  if (activation == Activation::kRelu) return x < 0 ? real(0) : x;
  if (activation == Activation::kNone) return x;
  if constexpr (std::is_same_v<scalar, BFloat16>) return approximate_tanh(x);
  return tanh(x);
}

// grad * d act(x) / dx as a function of the activated value.
template <Activation activation, typename real>
RNNT_DEVICE real through_activation(real grad, real value) {
  if (activation == Activation::kTanh) return grad * (1 - value * value);
  if (activation == Activation::kRelu) return value > 0 ? grad : real(0);
  return grad;
}

// Adds the gradients that reach the joiner's input to `sum`: of hidden elements with these
// gradients and values.
template <Activation activation, int width, typename scalar>
RNNT_DEVICE void add_through(const Vector<scalar, width>& grad, const Vector<scalar, width>& value,
                             acc_type<scalar> (&sum)[width]) {
  acc_type<scalar> g[width], h[width];
  unpack(grad, g);
  unpack(value, h);
#pragma unroll
  for (int k = 0; k < width; ++k) sum[k] += through_activation<activation>(g[k], h[k]);
}

}  // namespace pruned_rnnt::cuda
