// Arithmetic of log-probabilities on the device. float uses the special function units: exp2 and
// log2 with an absolute error of 2^-22 for results near 0, below the rounding of a recursion in
// float. double is precise.
#pragma once

#include <cmath>

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

template <typename real>
RNNT_DEVICE constexpr real minus_infinity() {
  return -std::numeric_limits<real>::infinity();
}

// Log 0 inside a recursion: a finite number, so that -inf - -inf needs no branch. Sums of it along
// any path stay finite, and anything below half of it is log 0.
template <typename real>
constexpr real kLogZero = static_cast<real>(-1e30);

template <typename real>
RNNT_DEVICE real from_log_zero(real x) {
  return x < kLogZero<real> / 2 ? minus_infinity<real>() : x;
}

// NaN stays NaN.
RNNT_DEVICE double to_log_zero(double x) { return x < kLogZero<double> ? kLogZero<double> : x; }
RNNT_DEVICE float to_log_zero(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(kLogZero<float>));
  return y;
#else
  return x < kLogZero<float> ? kLogZero<float> : x;
#endif
}

RNNT_DEVICE float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

RNNT_DEVICE float approximate_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Error of 2 units in the last place, for b below 2^126.
RNNT_DEVICE float divide(float a, float b) { return __fdividef(a, b); }

// Relative error 2^-11: enough for results that are rounded to bfloat16.
RNNT_DEVICE float approximate_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

RNNT_DEVICE float exp_of(float x) { return approximate_exp2(x * kLog2E); }
RNNT_DEVICE double exp_of(double x) { return exp(x); }
RNNT_DEVICE float log_of(float x) { return logf(x); }
RNNT_DEVICE double log_of(double x) { return log(x); }

// log(exp(a) + exp(b)) of numbers from kLogZero on; NaN stays NaN.
RNNT_DEVICE double log_add(double a, double b) { return fmax(a, b) + log1p(exp(-fabs(a - b))); }

template <typename real>
RNNT_DEVICE real log_sigmoid(real x) {
  return fmin(x, real(0)) - log1p(exp(-fabs(x)));
}

template <typename real>
RNNT_DEVICE real sigmoid(real x) {
  return real(1) / (real(1) + exp(-x));
}

// A running log-sum-exp: sum of exp(x - maximum).
template <typename real>
struct ExpSum {
  real maximum = std::numeric_limits<real>::lowest();
  real sum = 0;

  // Adds the terms of x[0..count): -inf adds nothing, NaN makes the sum NaN.
  template <int count>
  RNNT_DEVICE void add(const real (&x)[count]) {
    real larger = maximum;
#pragma unroll
    for (int i = 0; i < count; ++i) larger = fmax(larger, x[i]);
    sum *= exp_of(maximum - larger);
    maximum = larger;
#pragma unroll
    for (int i = 0; i < count; ++i) sum += exp_of(x[i] - larger);
  }

  RNNT_DEVICE void merge(real other_maximum, real other_sum) {
    const real larger = fmax(maximum, other_maximum);
    sum = sum * exp_of(maximum - larger) + other_sum * exp_of(other_maximum - larger);
    maximum = larger;
  }

  // Merges the lanes of a group inside a warp; every lane gets the result.
  template <int lanes>
  RNNT_DEVICE void merge_lanes() {
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

  // -inf if nothing was added.
  RNNT_DEVICE real log_sum() const { return maximum + log_of(sum); }
};

template <int lanes, typename real>
RNNT_DEVICE real sum_lanes(real x) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

}  // namespace pruned_rnnt::cuda
