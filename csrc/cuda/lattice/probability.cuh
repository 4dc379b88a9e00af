// Probabilities of any size, as the recursions over lattices add and multiply them, one operation
// waiting for the one before. In double they are logarithms. In float they are a factor times a
// power of 2: adding two takes half as long as a log-add does, and the relative error does not grow
// with the size of the logarithm.
#pragma once

#include "cuda/lattice/arc_shares.cuh"

namespace pruned_rnnt {
namespace cuda {

// factor * 2^exponent. Of NaN the factor is NaN; of 0 it is 0, and the exponent is out of the way.
struct ScaledProbability {
  static constexpr int32_t kLowest = -(1 << 30), kOfZero = -(1 << 29);

  float factor;
  int32_t exponent;

  __device__ __forceinline__ static ScaledProbability zero() { return {0.0f, kLowest}; }
  __device__ __forceinline__ static ScaledProbability one() { return {1.0f, 0}; }

  // exp(x), of kLogZero 0.
  __device__ __forceinline__ static ScaledProbability exp(float x) {
    constexpr float far = -2097152.0f;
    // Adding this rounds to a whole number, which then stands in the low bits.
    constexpr float rounder = 12582912.0f;
    // log2 e less the float next to it.
    constexpr float log2e_rest = 1.92596299e-8f;
    const float log2 = x * kLog2E;
    const float rounded = fminf(fmaxf(log2, far), -far) + rounder;
    const float rest = fmaf(x, log2e_rest, fmaf(x, kLog2E, rounder - rounded));
    ScaledProbability result{approximate_exp2(rest), static_cast<int32_t>(float_bits(rounded)) -
                                                         static_cast<int32_t>(float_bits(rounder))};
    if (log2 < far) {
      // Nothing behind the point is left.
      result.factor = x < kLogZero<float> / 2 ? 0.0f : 1.0f;
      result.exponent = static_cast<int32_t>(fmaxf(log2, static_cast<float>(kOfZero)));
    }
    return result;
  }
  // -inf of 0.
  __device__ __forceinline__ float log() const {
    return fmaf(static_cast<float>(exponent), kLn2, approximate_log2(factor) * kLn2);
  }

  __device__ __forceinline__ ScaledProbability operator*(const ScaledProbability& other) const {
    return {factor * other.factor, max(exponent + other.exponent, kLowest)};
  }
  __device__ __forceinline__ ScaledProbability operator+(const ScaledProbability& other) const {
    const int32_t larger = max(exponent, other.exponent);
    return {fmaf(factor, power_of_2(exponent - larger),
                 other.factor * power_of_2(other.exponent - larger)),
            larger};
  }

  // In double, from the float factor as it is.
  __device__ __forceinline__ double exact_log() const {
    return exponent * 0.69314718055994530942 + ::log(static_cast<double>(factor));
  }

  // emitted + stayed, and how they share it.
  __device__ __forceinline__ static ScaledProbability add_shared(const ScaledProbability& emitted,
                                                                 const ScaledProbability& stayed,
                                                                 float& share) {
    const int32_t larger = max(emitted.exponent, stayed.exponent);
    const float emit = emitted.factor * power_of_2(emitted.exponent - larger);
    const float stay = stayed.factor * power_of_2(stayed.exponent - larger);
    const float sum = emit + stay;
    // Nodes of which no path comes to the end have shares, too, but never a mass.
    share = share_of(emit < stay, sum == 0.0f ? 0.0f : divide(fminf(emit, stay), sum));
    return {sum, larger};
  }

  // In two places of memory.
  __device__ __forceinline__ void save(float* first, float* second) const {
    *first = factor;
    *second = bits_float(static_cast<uint32_t>(exponent));
  }
  __device__ __forceinline__ static ScaledProbability load(const float* first,
                                                           const float* second) {
    return {*first, static_cast<int32_t>(float_bits(*second))};
  }

  // Brings the factor back between 1 and 2. A sum or product of two changes it by 2^2 at most.
  __device__ __forceinline__ void normalise() {
    const int32_t power = static_cast<int32_t>(float_bits(factor) >> 23) - 127;
    factor *= bits_float(static_cast<uint32_t>(127 - power) << 23);
    exponent = max(exponent + power, kLowest);
  }

  __device__ __forceinline__ ScaledProbability of_lane(int lane) const {
    return {__shfl_sync(kAllLanes, factor, lane), __shfl_sync(kAllLanes, exponent, lane)};
  }
  __device__ __forceinline__ ScaledProbability of_lane_before() const {
    return {__shfl_up_sync(kAllLanes, factor, 1), __shfl_up_sync(kAllLanes, exponent, 1)};
  }

 private:
  __device__ __forceinline__ static uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
  }
  __device__ __forceinline__ static float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
  }
  // 2^n of n <= 0; what is below 2^-126 is 2^-126.
  __device__ __forceinline__ static float power_of_2(int32_t n) {
    return bits_float(static_cast<uint32_t>(max(n, -126) + 127) << 23);
  }
};

// The logarithm, with kLogZero for 0.
struct LogProbability {
  double value;

  __device__ __forceinline__ static LogProbability zero() { return {kLogZero<double>}; }
  __device__ __forceinline__ static LogProbability one() { return {0.0}; }
  __device__ __forceinline__ static LogProbability exp(double x) { return {x}; }
  __device__ __forceinline__ double log() const { return value; }
  __device__ __forceinline__ double exact_log() const { return from_log_zero(value); }
  __device__ __forceinline__ LogProbability operator*(const LogProbability& other) const {
    return {value + other.value};
  }
  __device__ __forceinline__ LogProbability operator+(const LogProbability& other) const {
    return {log_add(value, other.value)};
  }
  __device__ __forceinline__ static LogProbability add_shared(const LogProbability& emitted,
                                                              const LogProbability& stayed,
                                                              double& share) {
    const double smaller = ::exp(-fabs(emitted.value - stayed.value));
    share = share_of(emitted.value < stayed.value, smaller / (1 + smaller));
    return {fmax(emitted.value, stayed.value) + log1p(smaller)};
  }
  // The second place is not needed.
  __device__ __forceinline__ void save(double* first, double*) const { *first = value; }
  __device__ __forceinline__ static LogProbability load(const double* first, const double*) {
    return {*first};
  }
  __device__ __forceinline__ void normalise() {}
  __device__ __forceinline__ LogProbability of_lane(int lane) const {
    return {__shfl_sync(kAllLanes, value, lane)};
  }
  __device__ __forceinline__ LogProbability of_lane_before() const {
    return {__shfl_up_sync(kAllLanes, value, 1)};
  }
};

// Masses of paths (arc_shares.cuh), by the same names.
struct Occupancy {
  double value;

  __device__ __forceinline__ static Occupancy zero() { return {0.0}; }
  __device__ __forceinline__ static Occupancy one() { return {1.0}; }
  __device__ __forceinline__ Occupancy operator*(const Occupancy& other) const {
    return {value * other.value};
  }
  __device__ __forceinline__ Occupancy operator+(const Occupancy& other) const {
    return {value + other.value};
  }
  // In one place of memory; the second is not needed.
  template <typename real>
  __device__ __forceinline__ void save(real* first, real*) const {
    *first = static_cast<real>(value);
  }
  template <typename real>
  __device__ __forceinline__ static Occupancy load(const real* first, const real*) {
    return {static_cast<double>(*first)};
  }
  __device__ __forceinline__ void normalise() {}
  __device__ __forceinline__ Occupancy of_lane(int lane) const {
    return {__shfl_sync(kAllLanes, value, lane)};
  }
  __device__ __forceinline__ Occupancy of_lane_before() const {
    return {__shfl_up_sync(kAllLanes, value, 1)};
  }
};

template <typename real>
using Probability =
    std::conditional_t<std::is_same_v<real, float>, ScaledProbability, LogProbability>;

}  // namespace cuda
}  // namespace pruned_rnnt
