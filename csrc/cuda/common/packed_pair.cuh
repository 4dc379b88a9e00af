// Two neighbouring 16-bit numbers in one register: one instruction computes with both, or makes one
// of them a float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "cuda/common/vector_access.cuh"
#include "stable.h"

namespace pruned_rnnt::cuda {

template <typename scalar>
struct PackedPair;

template <>
struct PackedPair<BFloat16> {
  using Native = __nv_bfloat162;
  static constexpr uint32_t kMinusInfinities = 0xff80ff80u;

  // A bfloat16 is the upper half of a float.
  static RNNT_DEVICE Native rounded(float low, float high) {
    return __floats2bfloat162_rn(low, high);
  }
  RNNT_DEVICE float low() const { return __uint_as_float(bits << 16); }
  RNNT_DEVICE float high() const { return __uint_as_float(bits & 0xffff0000u); }

  uint32_t bits;
};

template <>
struct PackedPair<Half> {
  using Native = __half2;
  static constexpr uint32_t kMinusInfinities = 0xfc00fc00u;

  static RNNT_DEVICE Native rounded(float low, float high) { return __floats2half2_rn(low, high); }
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

// Whether vectors of this type are converted in pairs.
template <typename scalar, int width>
constexpr bool kInPairs = sizeof(scalar) == 2 && width % 2 == 0;

// A vector in the accumulator type.
template <int width, typename scalar>
RNNT_DEVICE void unpack(const Vector<scalar, width>& vector, acc_type<scalar> (&x)[width]) {
  if constexpr (kInPairs<scalar, width>) {
    PackedPair<scalar> pairs[width / 2];
    memcpy(pairs, &vector, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < width / 2; ++i) {
      x[2 * i] = pairs[i].low();
      x[2 * i + 1] = pairs[i].high();
    }
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = static_cast<acc_type<scalar>>(vector.x[i]);
  }
}

// Rounds numbers of the accumulator type.
template <typename scalar, int width>
RNNT_DEVICE Vector<scalar, width> pack(const acc_type<scalar> (&x)[width]) {
  Vector<scalar, width> vector;
  if constexpr (kInPairs<scalar, width>) {
    typename PackedPair<scalar>::Native pairs[width / 2];
#pragma unroll
    for (int i = 0; i < width / 2; ++i) {
      pairs[i] = PackedPair<scalar>::rounded(x[2 * i], x[2 * i + 1]);
    }
    memcpy(&vector, pairs, sizeof(vector));
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) vector.x[i] = static_cast<scalar>(x[i]);
  }
  return vector;
}

}  // namespace pruned_rnnt::cuda
