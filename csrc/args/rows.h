// Argument groups of the ops over rows of lattice nodes.
//
// Axes: N utterances, T frames, S columns of a frame, R rows of all utterances, K durations.
#pragma once

#include <vector>

#include "args/fields.h"

namespace pruned_rnnt {

// Where the nodes are: row_geometry.h. contracts::LatticeRows compares them.
struct LatticeRows {
  using Fields = std::tuple<const View&, const View&, const OptionalView&, const OptionalView&,
                            int64_t, int64_t>;
  View logit_lengths, target_lengths;
  OptionalView start, row_splits;
  int64_t T, S;
};

// pruned_rnnt/ops/joiner/log_probs.py: (R) each.
PRUNED_RNNT_VIEWS(RowLogProbs, 3, px, py, lse)

PRUNED_RNNT_VIEWS(RowStatistics, 3, lse, gx, gy)

// The options of log_probs_backward.
struct GradientOptions {
  using Fields = std::tuple<int64_t, int64_t, double, double>;
  int64_t blank, mode;
  double fastemit_lambda, clamp;
};

// pruned_rnnt/ops/lattice/tdt_lattice.py.
struct TdtOptions {
  using Fields = std::tuple<std::vector<int64_t>, double, double, bool>;
  std::vector<int64_t> durations;
  double sigma, delay_penalty;
  bool multi_blank;
};

// total (N), gx, gy and stay (R), gd (R,K).
PRUNED_RNNT_VIEWS(TdtSums, 5, total, gx, gy, stay, gd)

}  // namespace pruned_rnnt
