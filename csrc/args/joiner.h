// Argument groups of the ops that compute a joiner's logits in chunks,
// pruned_rnnt/ops/joiner/fused_log_probs.py.
//
// Axes: N batch, T frames, U symbols, D joiner dimension, V' rows of the output layer, C rows of
// the largest chunk.
#pragma once

#include <vector>

#include "args/rows.h"

namespace pruned_rnnt {

// Columns behind those of hidden rows: 1 for the bias, and zeros up to 16 bytes.
constexpr int64_t kBiasColumns = 8;
// Rows that a block of list_active_rows lists, ROWS_OF_BLOCK of active_rows.py, and what it has of
// them in `found`: a bit for each, and the number of active ones.
constexpr int64_t kListedRows = 4096, kListedWords = kListedRows / 32 + 1;

// am (N,T,D), lm (N,U+1,D), weight (V',D), bias (V') and targets (N,U); the rest of Python's
// JoinerInputs is the beginning of LatticeRows. weight and bias as tensors, from which the ops over
// active rows make others.
struct JoinerInputs {
  using Fields = std::tuple<const View&, const View&, const Tensor&, const Tensor&, const View&>;
  View am, lm;
  Tensor weight, bias;
  View targets;
};

// Python's JoinerPlan without the sizes of LatticeRows.
struct JoinerOptions {
  using Fields = std::tuple<std::vector<int64_t>, int64_t, bool, int64_t, int64_t, int64_t, int64_t,
                            int64_t, double, double, double>;

  GradientOptions of_gradient() const { return {blank, mode, fastemit_lambda, clamp}; }

  std::vector<int64_t> chunk_offsets;
  int64_t hidden_rows;
  bool counts_rows;
  int64_t vocabulary, activation, blank, mode, rnnt_type;
  double delay_penalty, fastemit_lambda, clamp;
};

// grad_am (N,T,D), grad_lm (N,U+1,D), grad_weight (V',D) and grad_bias (V').
struct JoinerGradients {
  using Fields =
      std::tuple<const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&>;
  Tensor grad_am, grad_lm;
  OptionalTensor grad_weight, grad_bias;
};

// active_joiner.py.
struct ActiveChunks {
  using Fields = std::tuple<int64_t, int64_t, int64_t>;
  int64_t chunk_rows, blocks, bias_parts;
};

// hidden (C,D) and logits (C,V').
PRUNED_RNNT_VIEWS(Workspace, 2, hidden, logits)

}  // namespace pruned_rnnt
