// Arithmetic of log-probabilities for the CPU: exp, log, tanh and log-add without calls or
// branches, so that loops over them become vector code. Plain float and double; 16-bit inputs are
// widened by the caller. Errors, over all arguments stated with each function, are at most 2 units
// in the last place against the exact value (tests/ops/test_native_cpu.py compares them with
// float64).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__GNUC__) || defined(__clang__)
#define PRUNED_RNNT_INLINE inline __attribute__((always_inline))
#else
#define PRUNED_RNNT_INLINE inline
#endif

namespace pruned_rnnt {

template <typename real>
constexpr real minus_infinity = -std::numeric_limits<real>::infinity();

template <typename To, typename From>
PRUNED_RNNT_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// What differs between float and double in exp, log and tanh.
template <typename real>
struct RealTraits;

template <>
struct RealTraits<float> {
  using integer = int32_t;
  static constexpr int mantissa_bits = 23;
  static constexpr integer exponent_bias = 127;
  // Adding and subtracting 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  static constexpr float rounder = 12582912.0f;
  // ln 2 in two parts; the first has so few bits that n * ln2_high is exact for |n| <= 256.
  static constexpr float ln2_high = 0.693145751953125f;
  static constexpr float ln2_low = 1.42860682030941723212e-6f;
  // Below this, exp would be subnormal: it is 0 here.
  static constexpr float exp_lowest = -87.33654f;
  static constexpr float exp_highest = 88.3762626647949f;
  // log(1 + y) with y <= 1: terms of the series of atanh up to z^15.
  static constexpr int atanh_terms = 8;
};

template <>
struct RealTraits<double> {
  using integer = int64_t;
  static constexpr int mantissa_bits = 52;
  static constexpr integer exponent_bias = 1023;
  static constexpr double rounder = 6755399441055744.0;
  static constexpr double ln2_high = 0.693147180369123816490;
  static constexpr double ln2_low = 1.90821492927058770002e-10;
  static constexpr double exp_lowest = -708.39641853226408;
  static constexpr double exp_highest = 709.4361393031;
  static constexpr int atanh_terms = 17;
};

// exp(r) - 1 for |r| <= ln(2)/2 by the Taylor series: the first term left out is below half a unit
// in the last place of exp(r).
PRUNED_RNNT_INLINE float exp_minus_one_small(float r) {
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 1.0f / 2;
  return (p * r) * r + r;
}

PRUNED_RNNT_INLINE double exp_minus_one_small(double r) {
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 1.0 / 2.0;
  return (p * r) * r + r;
}

// x = n ln 2 + r with |r| <= ln(2)/2; `scale` is 2^n.
template <typename real>
struct ExpParts {
  real r;
  real scale;
};

template <typename real>
PRUNED_RNNT_INLINE ExpParts<real> split_exponent(real x) {
  using traits = RealTraits<real>;
  using integer = typename traits::integer;
  constexpr real log2_e = static_cast<real>(1.44269504088896340736);
  const real shifted = x * log2_e + traits::rounder;
  const real n = shifted - traits::rounder;
  const integer power = bits_as<integer>(shifted) - bits_as<integer>(traits::rounder);
  const real r = (x - n * traits::ln2_high) - n * traits::ln2_low;
  using unsigned_integer = std::make_unsigned_t<integer>;
  const unsigned_integer biased = static_cast<unsigned_integer>(power + traits::exponent_bias);
  return {r, bits_as<real>(biased << traits::mantissa_bits)};
}

// exp(x); 0 where the result would be subnormal, infinity from exp_highest on; NaN stays NaN.
template <typename real>
PRUNED_RNNT_INLINE real exp_of(real x) {
  using traits = RealTraits<real>;
  real inside = x < traits::exp_lowest ? traits::exp_lowest : x;
  inside = inside > traits::exp_highest ? traits::exp_highest : inside;
  const ExpParts<real> parts = split_exponent(inside);
  real y = exp_minus_one_small(parts.r) * parts.scale + parts.scale;
  y = x < traits::exp_lowest ? real(0) : y;
  return x > traits::exp_highest ? std::numeric_limits<real>::infinity() : y;
}

// exp(x) for x <= 0 (or NaN), which is what sums after subtracting a maximum need.
template <typename real>
PRUNED_RNNT_INLINE real exp_of_nonpositive(real x) {
  using traits = RealTraits<real>;
  const ExpParts<real> parts = split_exponent(x < traits::exp_lowest ? traits::exp_lowest : x);
  const real y = exp_minus_one_small(parts.r) * parts.scale + parts.scale;
  return x < traits::exp_lowest ? real(0) : y;
}

// 2 atanh(z) for |z| <= 1/3.
template <typename real>
PRUNED_RNNT_INLINE real twice_atanh(real z) {
  const real square = z * z;
  real p = real(1) / (2 * RealTraits<real>::atanh_terms - 1);
  for (int term = RealTraits<real>::atanh_terms - 2; term >= 1; --term) {
    p = p * square + real(1) / (2 * term + 1);
  }
  return 2 * z + 2 * z * (square * p);
}

// log(1 + y) for 0 <= y <= 1.
template <typename real>
PRUNED_RNNT_INLINE real log_one_plus(real y) {
  return twice_atanh(y / (2 + y));
}

// log(x) for positive normal numbers.
template <typename real>
PRUNED_RNNT_INLINE real log_of_positive(real x) {
  using traits = RealTraits<real>;
  using integer = typename traits::integer;
  // x = 2^n m with sqrt(1/2) <= m < sqrt(2), so that log(m) does not cancel against n ln 2.
  constexpr real root_half = static_cast<real>(0.70710678118654752440);
  const integer offset = bits_as<integer>(x) - bits_as<integer>(root_half);
  const integer n = offset >> traits::mantissa_bits;
  using unsigned_integer = std::make_unsigned_t<integer>;
  const real m = bits_as<real>(
      static_cast<integer>(static_cast<unsigned_integer>(bits_as<integer>(x)) -
                           (static_cast<unsigned_integer>(n) << traits::mantissa_bits)));
  const real exponent = static_cast<real>(n);
  const real log_m = twice_atanh((m - 1) / (m + 1));
  return exponent * traits::ln2_high + (log_m + exponent * traits::ln2_low);
}

// log(exp(a) + exp(b)). Two equal infinities give that infinity; NaN stays NaN.
template <typename real>
PRUNED_RNNT_INLINE real log_add(real a, real b) {
  const real larger = a > b ? a : b;
  const real distance = a == b ? real(0) : -std::fabs(a - b);
  return larger + log_one_plus(exp_of_nonpositive(distance));
}

// tanh through exp(-2|x|) - 1, which keeps its relative precision near 0.
template <typename real>
PRUNED_RNNT_INLINE real tanh_of(real x) {
  const real twice = -2 * std::fabs(x);
  const ExpParts<real> parts = split_exponent(twice < real(-64) ? real(-64) : twice);
  const real minus_one = exp_minus_one_small(parts.r) * parts.scale + (parts.scale - 1);
  return std::copysign(-minus_one / (2 + minus_one), x);
}

}  // namespace pruned_rnnt
