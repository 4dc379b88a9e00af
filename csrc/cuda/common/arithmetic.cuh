// Arithmetic of log-probabilities on the device. float runs on the special function units: exp2 and
// log2 with an absolute error of 2^-22 for results near 0, which is less than what a recursion in
// float rounds off anyway. double is precise.
#pragma once

#include <cmath>

#include "cuda/common/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

template <typename real>
__device__ __forceinline__ constexpr real minus_infinity() {
  return -std::numeric_limits<real>::infinity();
}

// Stands for log 0 inside a recursion: a number, so that no branch has to keep -inf - -inf away.
// Sums of these over any path stay finite, and what is not above half of it is log 0.
template <typename real>
constexpr real kLogZero = static_cast<real>(-1e30);

template <typename real>
__device__ __forceinline__ real from_log_zero(real x) {
  return x < kLogZero<real> / 2 ? minus_infinity<real>() : x;
}

// NaN stays NaN.
__device__ __forceinline__ double to_log_zero(double x) {
  return x < kLogZero<double> ? kLogZero<double> : x;
}
__device__ __forceinline__ float to_log_zero(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(kLogZero<float>));
  return y;
#else
  return x < kLogZero<float> ? kLogZero<float> : x;
#endif
}

#ifdef PRUNED_RNNT_EMULATED
inline float approximate_exp2(float x) { return std::exp2(x); }
inline float approximate_log2(float x) { return std::log2(x); }
inline float approximate_tanh(float x) { return std::tanh(x); }
inline float divide(float a, float b) { return a / b; }
#else
__device__ __forceinline__ float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float approximate_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// With an error of 2 units in the last place, for b below 2^126.
__device__ __forceinline__ float divide(float a, float b) { return __fdividef(a, b); }

// Relative error 2^-11: enough where the result is rounded to bfloat16.
__device__ __forceinline__ float approximate_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

__device__ __forceinline__ float exp_of(float x) { return approximate_exp2(x * kLog2E); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

// log(exp(a) + exp(b)) of numbers from kLogZero on; NaN stays NaN.
__device__ __forceinline__ float log_add(float a, float b) {
  const float small = approximate_exp2(-fabsf(a - b) * kLog2E);
  return fmaf(approximate_log2(1.0f + small), kLn2, fmaxf(a, b));
}

__device__ __forceinline__ double log_add(double a, double b) {
  return fmax(a, b) + log1p(exp(-fabs(a - b)));
}

template <typename real>
__device__ __forceinline__ real log_sigmoid(real x) {
  return fmin(x, real(0)) - log1p(exp(-fabs(x)));
}

template <typename real>
__device__ __forceinline__ real sigmoid(real x) {
  return real(1) / (real(1) + exp(-x));
}

// A running log-sum-exp: sum of exp(x - maximum).
template <typename real>
struct ExpSum {
  real maximum = std::numeric_limits<real>::lowest();
  real sum = 0;

  // Adds the terms of x[0..count): -inf adds nothing, NaN makes the sum NaN.
  template <int count>
  __device__ __forceinline__ void add(const real (&x)[count]) {
    real larger = maximum;
#pragma unroll
    for (int i = 0; i < count; ++i) larger = fmax(larger, x[i]);
    sum *= exp_of(maximum - larger);
    maximum = larger;
#pragma unroll
    for (int i = 0; i < count; ++i) sum += exp_of(x[i] - larger);
  }

  __device__ __forceinline__ void merge(real other_maximum, real other_sum) {
    const real larger = fmax(maximum, other_maximum);
    sum = sum * exp_of(maximum - larger) + other_sum * exp_of(other_maximum - larger);
    maximum = larger;
  }

  // Over the lanes of a group inside a warp; every lane gets the result.
  template <int lanes>
  __device__ __forceinline__ void merge_lanes() {
    real larger = maximum;
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      larger = fmax(larger, __shfl_xor_sync(kAllLanes, larger, distance));
    }
    sum *= exp_of(maximum - larger);
    maximum = larger;
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
  }

  // -inf where nothing was added.
  __device__ __forceinline__ real log_sum() const { return maximum + log_of(sum); }
};

template <int lanes, typename real>
__device__ __forceinline__ real sum_lanes(real x) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

}  // namespace cuda
}  // namespace pruned_rnnt
