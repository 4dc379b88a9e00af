// Options of the joiners that the CPU and CUDA kernels share.
#pragma once

#include "args/simple.h"

namespace pruned_rnnt {

enum class Activation : int64_t { kNone = 0, kTanh = 1, kRelu = 2 };

// How logits become log-probabilities (`mode` of log_probs, pruned_rnnt/ops/joiner/log_probs.py).
enum class LogitMode : int32_t { kSoftmax = 0, kLogProbs = 1, kHat = 2 };

// Calls work(std::integral_constant<Activation, ...>) for the activation with this number.
template <typename Work>
void dispatch_activation(int64_t number, Work&& work) {
  const bool found = dispatch_value<Activation::kNone, Activation::kTanh, Activation::kRelu>(
      static_cast<Activation>(number), work);
  STD_TORCH_CHECK(found, "unknown activation number ", number);
}

// Trivial joiner: products of exponentials below this may have underflowed and are not used.
template <typename real>
constexpr real kSafeProduct = std::is_same_v<real, double> ? real(1e-280) : real(1e-28);

// Weights of the trivial joiner's three distributions: combined, of lm alone, of am alone.
template <typename real>
struct SmoothingScales {
  explicit SmoothingScales(const Scales& scales)
      : combined(static_cast<real>(1 - scales.lm_only - scales.am_only)),
        lm_only(static_cast<real>(scales.lm_only)),
        am_only(static_cast<real>(scales.am_only)) {}

  real combined, lm_only, am_only;
};

}  // namespace pruned_rnnt
