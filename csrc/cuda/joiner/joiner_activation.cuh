// The joiner's activations and their derivatives.
#pragma once

#include "cuda/common/arithmetic.cuh"
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

}  // namespace pruned_rnnt::cuda
