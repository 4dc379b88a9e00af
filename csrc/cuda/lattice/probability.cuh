// Probabilities of any size, for recursions over lattices, whose steps depend on each other. double
// uses logarithms. float uses factor * 2^exponent: adding two takes half as long as a log-add, and
// the relative error does not grow with the size of the logarithm.
#pragma once

#include "cuda/lattice/arc_shares.cuh"

namespace pruned_rnnt::cuda {

// factor * 2^exponent. NaN has a factor of NaN, 0 a factor of 0 and a very low exponent.
struct ScaledProbability {
  static constexpr int32_t kLowest = -(1 << 30), kOfZero = -(1 << 29);

  float factor;
  int32_t exponent;

  RNNT_DEVICE static ScaledProbability zero() { return {0.0f, kLowest}; }
  RNNT_DEVICE static ScaledProbability one() { return {1.0f, 0}; }

  // exp(x); 0 for kLogZero.
  RNNT_DEVICE static ScaledProbability exp(float x) {
    constexpr float far = -2097152.0f;
    // Adding this rounds to an integer and leaves it in the low bits.
    constexpr float rounder = 12582912.0f;
    // log2 e minus kLog2E.
    constexpr float log2e_rest = 1.92596299e-8f;
    const float log2 = x * kLog2E;
    const float rounded = fminf(fmaxf(log2, far), -far) + rounder;
    const float rest = fmaf(x, log2e_rest, fmaf(x, kLog2E, rounder - rounded));
    ScaledProbability result{approximate_exp2(rest),
                             int32_t(float_bits(rounded)) - int32_t(float_bits(rounder))};
    if (log2 < far) {
      // x has no fraction left.
      result.factor = x < kLogZero<float> / 2 ? 0.0f : 1.0f;
      result.exponent = int32_t(fmaxf(log2, static_cast<float>(kOfZero)));
    }
    return result;
  }
  // -inf for 0.
  RNNT_DEVICE float log() const {
    return fmaf(static_cast<float>(exponent), kLn2, approximate_log2(factor) * kLn2);
  }

  RNNT_DEVICE ScaledProbability operator*(const ScaledProbability& other) const {
    return {factor * other.factor, max(exponent + other.exponent, kLowest)};
  }
  RNNT_DEVICE ScaledProbability operator+(const ScaledProbability& other) const {
    const int32_t larger = max(exponent, other.exponent);
    return {fmaf(factor, power_of_2(exponent - larger),
                 other.factor * power_of_2(other.exponent - larger)),
            larger};
  }

  // The logarithm in double.
  RNNT_DEVICE double exact_log() const {
    return exponent * 0.69314718055994530942 + ::log(static_cast<double>(factor));
  }

  // emitted + stayed, and their shares.
  RNNT_DEVICE static ScaledProbability add_shared(const ScaledProbability& emitted,
                                                  const ScaledProbability& stayed, float& share) {
    const int32_t larger = max(emitted.exponent, stayed.exponent);
    const float emit = emitted.factor * power_of_2(emitted.exponent - larger);
    const float stay = stayed.factor * power_of_2(stayed.exponent - larger);
    const float sum = emit + stay;
    // Nodes from which no path reaches the end have shares, too, but no mass.
    share = share_of(emit < stay, sum == 0.0f ? 0.0f : divide(fminf(emit, stay), sum));
    return {sum, larger};
  }

  // Uses two elements of memory.
  RNNT_DEVICE void save(float* first, float* second) const {
    *first = factor;
    *second = bits_float(uint32_t(exponent));
  }
  RNNT_DEVICE static ScaledProbability load(const float* first, const float* second) {
    return {*first, int32_t(float_bits(*second))};
  }

  // Scales the factor back to 1 .. 2. A sum or product of two changes it by 2^2 at most.
  RNNT_DEVICE void normalise() {
    const int32_t power = int32_t(float_bits(factor) >> 23) - 127;
    factor *= bits_float(uint32_t(127 - power) << 23);
    exponent = max(exponent + power, kLowest);
  }

  RNNT_DEVICE ScaledProbability of_lane(int lane) const {
    return {__shfl_sync(kAllLanes, factor, lane), __shfl_sync(kAllLanes, exponent, lane)};
  }
  RNNT_DEVICE ScaledProbability of_lane_before() const {
    return {__shfl_up_sync(kAllLanes, factor, 1), __shfl_up_sync(kAllLanes, exponent, 1)};
  }

  // 2^n for n <= 0, at least 2^-126.
  RNNT_DEVICE static float power_of_2(int32_t n) {
    return bits_float(uint32_t(max(n, -126) + 127) << 23);
  }

 private:
  RNNT_DEVICE static uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
  }
  RNNT_DEVICE static float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
  }
};

// The logarithm, with kLogZero for 0.
struct LogProbability {
  double value;

  RNNT_DEVICE static LogProbability zero() { return {kLogZero<double>}; }
  RNNT_DEVICE static LogProbability one() { return {0.0}; }
  RNNT_DEVICE static LogProbability exp(double x) { return {x}; }
  RNNT_DEVICE double log() const { return value; }
  RNNT_DEVICE double exact_log() const { return from_log_zero(value); }
  RNNT_DEVICE LogProbability operator*(const LogProbability& other) const {
    return {value + other.value};
  }
  RNNT_DEVICE LogProbability operator+(const LogProbability& other) const {
    return {log_add(value, other.value)};
  }
  RNNT_DEVICE static LogProbability add_shared(const LogProbability& emitted,
                                               const LogProbability& stayed, double& share) {
    const double smaller = ::exp(-fabs(emitted.value - stayed.value));
    share = share_of(emitted.value < stayed.value, smaller / (1 + smaller));
    return {fmax(emitted.value, stayed.value) + log1p(smaller)};
  }
  // The second element is not used.
  RNNT_DEVICE void save(double* first, double*) const { *first = value; }
  RNNT_DEVICE static LogProbability load(const double* first, const double*) { return {*first}; }
  RNNT_DEVICE void normalise() {}
  RNNT_DEVICE LogProbability of_lane(int lane) const {
    return {__shfl_sync(kAllLanes, value, lane)};
  }
  RNNT_DEVICE LogProbability of_lane_before() const {
    return {__shfl_up_sync(kAllLanes, value, 1)};
  }
};

// Masses of paths (arc_shares.cuh), with the same interface.
struct Occupancy {
  double value;

  RNNT_DEVICE static Occupancy zero() { return {0.0}; }
  RNNT_DEVICE static Occupancy one() { return {1.0}; }
  RNNT_DEVICE Occupancy operator*(const Occupancy& other) const { return {value * other.value}; }
  RNNT_DEVICE Occupancy operator+(const Occupancy& other) const { return {value + other.value}; }
  // The second element is not used.
  template <typename real>
  RNNT_DEVICE void save(real* first, real*) const {
    *first = static_cast<real>(value);
  }
  template <typename real>
  RNNT_DEVICE static Occupancy load(const real* first, const real*) {
    return {static_cast<double>(*first)};
  }
  RNNT_DEVICE void normalise() {}
  RNNT_DEVICE Occupancy of_lane(int lane) const { return {__shfl_sync(kAllLanes, value, lane)}; }
  RNNT_DEVICE Occupancy of_lane_before() const { return {__shfl_up_sync(kAllLanes, value, 1)}; }
};

template <typename real>
using Probability =
    std::conditional_t<std::is_same_v<real, float>, ScaledProbability, LogProbability>;

}  // namespace pruned_rnnt::cuda
