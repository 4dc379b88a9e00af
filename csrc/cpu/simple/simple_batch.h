// What the ops of the trivial joiner share: sizes, symbols, scales and the limit below which a
// matrix product of exponentials is not trusted. Formulas:
// pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary.
#pragma once

#include "stable.h"

namespace pruned_rnnt {

// Products from here on have lost nothing that could be seen to underflow.
template <typename real>
constexpr real safe_product = std::is_same_v<real, double> ? real(1e-280) : real(1e-28);

// The sizes and index arithmetic that the three ops share.
struct Batch {
  Batch(const Tensor& product, const Tensor& logit_lengths, const Tensor& target_lengths)
      : N(product.size(0)),
        T(product.size(1)),
        width(product.size(2)),
        logit_lengths(data_of<int32_t>(logit_lengths)),
        target_lengths(data_of<int32_t>(target_lengths)) {}

  // Frames and symbol positions that have nodes; none where the lengths do not fit the padding.
  int64_t frames(int64_t n) const { return fits(n) ? logit_lengths[n] : 0; }
  int64_t positions(int64_t n) const { return fits(n) ? target_lengths[n] + 1 : 0; }
  bool fits(int64_t n) const {
    return logit_lengths[n] <= T && target_lengths[n] >= 0 && target_lengths[n] < width;
  }

  int64_t N, T, width;  // width is U + 1
  const int32_t *logit_lengths, *target_lengths;
};

struct Vocabulary {
  Vocabulary(const Tensor& targets, int64_t size, int64_t blank)
      : targets(data_of<int32_t>(targets)), U(targets.size(1)), size(size), blank(blank) {}

  // The symbol emitted at position u; negative for the blank and for one not in the vocabulary.
  int64_t symbol(int64_t n, int64_t u) const {
    const int64_t y = u < U ? targets[n * U + u] : -1;
    return y < size && y != blank ? y : -1;
  }

  const int32_t* targets;
  int64_t U, size, blank;
};

template <typename real>
struct Scales {
  Scales(double lm_only_scale, double am_only_scale)
      : combined(static_cast<real>(1 - lm_only_scale - am_only_scale)),
        lm_only(static_cast<real>(lm_only_scale)),
        am_only(static_cast<real>(am_only_scale)) {}

  real combined, lm_only, am_only;
};

}  // namespace pruned_rnnt
