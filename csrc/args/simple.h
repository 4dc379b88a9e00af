// Argument groups of the trivial joiner's ops, pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary; U' and V' with the padding of the products.
#pragma once

#include "args/fields.h"

namespace pruned_rnnt {

// am_max (N,T) and lm_max (N,U+1).
PRUNED_RNNT_VIEWS(RowMaxima, 2, am_max, lm_max)

// lm_lse (N,U+1), am_lse (N,T) and log_q (V); null where the scale is 0.
struct Smoothing {
  using Fields = OptionalViews<3>;
  OptionalView lm_lse, am_lse, log_q;
};

// targets (N,U) and lengths (N), int32.
PRUNED_RNNT_VIEWS(TargetsAndLengths, 3, targets, logit_lengths, target_lengths)

struct Scales {
  using Fields = std::tuple<int64_t, double, double>;
  int64_t blank;
  double lm_only, am_only;
};

// (N,T,U+1) each.
PRUNED_RNNT_VIEWS(NodeScores, 3, px, py, logz)

// grad_loss (N), and the occupancies gx and gy (N,T,U+1).
PRUNED_RNNT_VIEWS(NodeUpstream, 3, grad_loss, gx, gy)

// product (N,T,U'), logz (N,T,U+1), am_sum (N,T,V') and lm_sum (N,U',V').
PRUNED_RNNT_VIEWS(Products, 4, product, logz, am_sum, lm_sum)

}  // namespace pruned_rnnt
