// exp, log, tanh and log1p for the CPU without calls or branches, so that compilers vectorise loops
// over them. For float and double; callers widen 16-bit inputs. Errors are at most 2 units in the
// last place for all arguments stated with each function (tests/ops/test_native_cpu.py compares
// them with float64).
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

// Constants of exp, log and tanh.
template <typename real>
struct RealTraits {
  static constexpr bool is_float = std::is_same_v<real, float>;
  static constexpr real choose(double for_float, double for_double) {
    return static_cast<real>(is_float ? for_float : for_double);
  }

  using integer = std::conditional_t<is_float, int32_t, int64_t>;
  static constexpr int mantissa_bits = is_float ? 23 : 52;
  static constexpr integer exponent_bias = is_float ? 127 : 1023;
  // Adding 1.5 * 2^mantissa_bits rounds to an integer and leaves it in the low bits.
  static constexpr real rounder = choose(12582912.0, 6755399441055744.0);
  // ln 2 in two parts; the first has so few bits that n * ln2_high is exact for all exponents n.
  static constexpr real ln2_high = choose(0.693145751953125, 0.693147180369123816490);
  static constexpr real ln2_low = choose(1.42860682030941723212e-6f, 1.90821492927058770002e-10);
  // Below this, exp would be subnormal; it is 0 here.
  static constexpr real exp_lowest = choose(-87.33654f, -708.39641853226408);
  // exp(r) = 1 + r + r^2 / 2! + .. + r^exp_terms / exp_terms!
  static constexpr int exp_terms = is_float ? 7 : 13;
  // log(1 + y) with y <= 1: terms of the series of atanh, up to z^(2 atanh_terms - 1).
  static constexpr int atanh_terms = is_float ? 8 : 17;
};

constexpr double factorial(int n) { return n < 2 ? 1.0 : n * factorial(n - 1); }

// exp(r) - 1 for |r| <= ln(2)/2 by the Taylor series, terms exp_terms down to `term`: the first one
// left out is below half a unit in the last place of exp(r).
template <int term, typename real>
PRUNED_RNNT_INLINE real taylor_sum(real r, real sum) {
  constexpr real coefficient = real(1) / static_cast<real>(factorial(term));
  sum = sum * r + coefficient;
  if constexpr (term > 2) return taylor_sum<term - 1>(r, sum);
  return sum;
}
template <typename real>
PRUNED_RNNT_INLINE real exp_minus_one_small(real r) {
  constexpr int terms = RealTraits<real>::exp_terms;
  constexpr real first = real(1) / static_cast<real>(factorial(terms));
  return (taylor_sum<terms - 1>(r, first) * r) * r + r;
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

// exp(x) for x <= 0 or NaN, as sums need it after subtracting the maximum.
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

// tanh through exp(-2|x|) - 1, which keeps its relative precision near 0.
template <typename real>
PRUNED_RNNT_INLINE real tanh_of(real x) {
  const real twice = -2 * std::fabs(x);
  const ExpParts<real> parts = split_exponent(twice < real(-64) ? real(-64) : twice);
  const real minus_one = exp_minus_one_small(parts.r) * parts.scale + (parts.scale - 1);
  return std::copysign(-minus_one / (2 + minus_one), x);
}

}  // namespace pruned_rnnt
