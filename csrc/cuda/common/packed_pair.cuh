// Two neighbouring 16-bit numbers in one register: one instruction computes with both, or makes one
// of them a float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "cuda/common/launch.cuh"
#include "stable.h"

namespace pruned_rnnt::cuda {

template <typename scalar>
struct PackedPair;

template <>
struct PackedPair<BFloat16> {
  using Native = __nv_bfloat162;
  static constexpr uint32_t kMinusInfinities = 0xff80ff80u;

  // A bfloat16 is the upper half of a float.
  RNNT_DEVICE float low() const { return __uint_as_float(bits << 16); }
  RNNT_DEVICE float high() const { return __uint_as_float(bits & 0xffff0000u); }

  uint32_t bits;
};

template <>
struct PackedPair<Half> {
  using Native = __half2;
  static constexpr uint32_t kMinusInfinities = 0xfc00fc00u;

  RNNT_DEVICE float low() const { return __half2float(__ushort_as_half(bits & 0xffffu)); }
  RNNT_DEVICE float high() const { return __half2float(__ushort_as_half(bits >> 16)); }

  uint32_t bits;
};

// Of both numbers; a number is larger than NaN.
template <typename scalar>
RNNT_DEVICE PackedPair<scalar> larger(PackedPair<scalar> a, PackedPair<scalar> b) {
  typename PackedPair<scalar>::Native x, y;
  memcpy(&x, &a, sizeof(x));
  memcpy(&y, &b, sizeof(y));
  x = __hmax2(x, y);
  memcpy(&a, &x, sizeof(x));
  return a;
}

// Puts -inf in the place of the numbers whose bits are not in `kept`.
template <typename scalar>
RNNT_DEVICE PackedPair<scalar> keep(PackedPair<scalar> pair, uint32_t kept) {
  return {(pair.bits & kept) | (PackedPair<scalar>::kMinusInfinities & ~kept)};
}

}  // namespace pruned_rnnt::cuda
