// Argument groups of the searches, pruned_rnnt/ops/search.
//
// Axes: N batch, T frames, B rows of a beam, C symbols of a context, P predictor width, D joiner
// width, V vocabulary.
#pragma once

#include "args/fields.h"

namespace pruned_rnnt {

// search_frames.py: tables (C,V+1,P), decoder_weight (D,P), decoder_bias (D), output_weight (V,D),
// output_bias and silent (V).
struct SearchModelArguments {
  using Fields = decltype(std::tuple_cat(std::declval<Views<6>>(),
                                         std::declval<std::tuple<int64_t, int64_t, bool>>()));
  View tables, decoder_weight, decoder_bias, output_weight, output_bias, silent;
  int64_t blank, activation;
  bool hat;
};

// search_frames.py: lm (N,D) and context (N,C).
PRUNED_RNNT_VIEWS(PredictorState, 2, lm, context)

// search_frames.py: score, hash and length (N,B), lm (N,B,D), context (N,B,C).
PRUNED_RNNT_VIEWS(BeamState, 5, score, hash, length, lm, context)

// (N,T,B) each.
PRUNED_RNNT_VIEWS(BeamSteps, 3, parent, symbol, added)

}  // namespace pruned_rnnt
