// The model that searches run, frame by frame. Contract: pruned_rnnt/ops/search/search_frames.py.
//
// A frame reads little and computes little, so that starting torch's kernels would take most of the
// time.
//
// Axes: C symbols of a context, P predictor width, D joiner width, V vocabulary.
#pragma once

#include "args/search.h"
#include "cpu/common/hidden_row.h"
#include "cpu/search/context_table.h"

namespace pruned_rnnt {

struct SearchModel {
  explicit SearchModel(const SearchModelArguments& x)
      : predictor{data_of<float>(x.tables),       data_of<float>(x.decoder_weight),
                  data_of<float>(x.decoder_bias), x.tables.size(0),
                  x.output_weight.size(0),        x.tables.size(2),
                  x.output_weight.size(1)},
        output_weight(data_of<float>(x.output_weight)),
        output_bias(data_of<float>(x.output_bias)),
        silent(data_of<bool>(x.silent)),
        D(x.output_weight.size(1)),
        V(x.output_weight.size(0)),
        blank(x.blank),
        activation(x.activation),
        hat(x.hat) {}

  // am, lm, hidden: (D,).
  void compute_hidden(const float* am, const float* lm, float* hidden) const {
    dispatch_activation(activation, [&](auto chosen) {
      run_vectorised<HiddenRow<decltype(chosen)::value>>(am, lm, D, hidden);
    });
  }

  // (rows,D) -> (rows,V).
  void compute_logits(const float* hidden, int64_t rows, float* logits) const {
    RowProduct{hidden, output_weight, output_bias, rows, D, V, logits}.run();
  }

  ContextPredictor predictor;
  const float *output_weight, *output_bias;  // (V,D), (V)
  const bool* silent;                        // (V)
  int64_t D, V, blank, activation;
  bool hat;
};

}  // namespace pruned_rnnt
