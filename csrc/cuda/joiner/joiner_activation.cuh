// The activations of the joiner, and how a gradient passes through them.
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace pruned_rnnt {
namespace cuda {

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

}  // namespace cuda
}  // namespace pruned_rnnt
