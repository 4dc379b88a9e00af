// Products of float32 numbers on tensor cores, as precise as float32 products without them.
//
// Tensor cores multiply TF32 numbers, which have 11 bits. Each factor is the sum of two of them,
// x = high + low with high = x rounded to TF32, so that
//
//   a b = a_high b_high + a_high b_low + a_low b_high + (a_low b_low, below 2^-22 |a b|, left out)
//
// Each tensor-core instruction truncates its sum to float32, which would add up to an error in
// proportion to the length of the sum: only short runs may be summed by them, small terms first,
// and these sums by ordinary additions, which round to nearest.
//
// Infinite elements give NaN (high - high), as they give infinity or NaN elsewhere.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

// The nearest TF32 number.
RNNT_DEVICE float high_part(float x) {
  uint32_t bits = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return __uint_as_float(bits);
}

// The parts of `count` elements; tensor cores ignore the last 13 bits of the low part.
template <int count>
RNNT_DEVICE void split(const float (&x)[count], float (&high)[count], float (&low)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    high[i] = high_part(x[i]);
    low[i] = x[i] - high[i];
  }
}

// sum = a b, or with `add` sum += a b, for a 16 x 8 tile of the result.
RNNT_DEVICE void multiply(float (&sum)[4], const float (&a)[4], const float (&b)[2], bool add) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])),
        "f"(add ? sum[0] : 0.0f), "f"(add ? sum[1] : 0.0f), "f"(add ? sum[2] : 0.0f),
        "f"(add ? sum[3] : 0.0f));
#endif
}

}  // namespace pruned_rnnt::cuda
