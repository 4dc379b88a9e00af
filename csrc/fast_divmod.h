// Division of 32-bit numbers by a divisor that stays the same, by one multiplication and two shifts
// (Granlund and Montgomery 1994, "Division by invariant integers using multiplication", figure
// 4.1). Exact for every dividend 0 .. 2^32 - 1 and every divisor 1 .. 2^32 - 1.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace pruned_rnnt {

struct Division {
  uint32_t quotient, remainder;
};

class FastDivmod {
 public:
  FastDivmod() : FastDivmod(1) {}

  explicit FastDivmod(uint32_t divisor) : divisor_(divisor) {
    // 2^(bits-1) < divisor <= 2^bits.
    int bits = 0;
    while (bits < 32 && (uint64_t(1) << bits) < divisor) ++bits;
    const uint64_t excess = (uint64_t(1) << bits) - divisor;
    multiplier_ = static_cast<uint32_t>((excess << 32) / divisor + 1);
    first_shift_ = bits < 1 ? bits : 1;
    second_shift_ = bits > 1 ? bits - 1 : 0;
  }

  PRUNED_RNNT_HOST_DEVICE uint32_t divide(uint32_t dividend) const {
#ifdef __CUDA_ARCH__
    const uint32_t product = __umulhi(multiplier_, dividend);
#else
    const uint32_t product = static_cast<uint32_t>((uint64_t(multiplier_) * dividend) >> 32);
#endif
    // product <= dividend, and the sum below is at most dividend: nothing overflows.
    return (product + ((dividend - product) >> first_shift_)) >> second_shift_;
  }

  PRUNED_RNNT_HOST_DEVICE Division divmod(uint32_t dividend) const {
    const uint32_t quotient = divide(dividend);
    return {quotient, dividend - quotient * divisor_};
  }

  PRUNED_RNNT_HOST_DEVICE uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_, multiplier_;
  int32_t first_shift_, second_shift_;
};

}  // namespace pruned_rnnt
