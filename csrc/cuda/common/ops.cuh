// Host functions of the ops that the pruned step calls (pruned_step.cu). Contracts: the Python
// files of the same names.
#pragma once

#include <vector>

#include "args/rows.h"
#include "args/simple.h"
#include "cuda/common/device_op.cuh"

namespace pruned_rnnt::cuda {

struct ExpRows {
  View x, lengths;
  int64_t extra;
  View row_max, row_lse, x_exp;
};

constexpr int kMostExpRows = 2;
// exp_rows of `count` inputs of one width and type, in one launch.
void exp_rows_of(const Launcher& launch, const ExpRows* all, int count);

void simple_product(const Launcher& launch, const View& am_exp, const View& lm_exp,
                    const View& product);

void simple_sums(const Launcher& launch, const View& weights, const View& am_exp,
                 const View& lm_exp, const View& lm_sum, const View& am_sum);

void simple_log_probs(const Launcher& launch, const View& am, const View& lm,
                      const RowMaxima& maxima, const View& product, const Smoothing& smoothing,
                      const TargetsAndLengths& utterances, const Scales& scales,
                      const NodeScores& out);

void simple_weights(const Launcher& launch, const NodeUpstream& upstream, const View& product,
                    const View& logit_lengths, const View& target_lengths, double scale,
                    double fastemit_lambda, const View& weights);

void simple_backward(const Launcher& launch, const NodeUpstream& upstream, const View& am,
                     const View& lm, const RowMaxima& maxima, const Products& products,
                     const Smoothing& smoothing, const TargetsAndLengths& utterances,
                     const Scales& scales, double fastemit_lambda, const View& grad_am,
                     const View& grad_lm);

void band_lattice(const Launcher& launch, const View& px, const View& py,
                  const LatticeRows& lattice, int64_t rnnt_type, double delay_penalty,
                  const View& work, const View& total, const View& gx, const View& gy);

void prune_bounds(const Launcher& launch, const View& gx, const View& gy, const View& logit_lengths,
                  const View& target_lengths, int64_t s_range, int64_t rnnt_type,
                  bool padded_search, const View& start);

void prune_bounds_exact(const Launcher& launch, const View& gx, const View& gy,
                        const View& logit_lengths, const View& target_lengths, int64_t s_range,
                        int64_t rnnt_type, const View& scratch, const View& start);

void log_probs(const Launcher& launch, const View& logits, const View& targets,
               const LatticeRows& lattice, int64_t row_begin, int64_t blank, int64_t mode_number,
               const RowLogProbs& out);

void log_probs_backward(const Launcher& launch, const View& grad_loss, const View& logits,
                        const RowStatistics& statistics, const View& targets,
                        const LatticeRows& lattice, int64_t row_begin,
                        const GradientOptions& options, const View& grad_logits);

void joiner_rows(const Launcher& launch, const View& am, const View& lm, const LatticeRows& lattice,
                 int64_t row_begin, int64_t activation, const View& hidden);

void joiner_rows_backward(const Launcher& launch, const View& grad_hidden, const View& hidden,
                          const LatticeRows& lattice, int64_t row_begin, int64_t activation,
                          const View& grad_am, const View& grad_lm);

// Sums of the first columns of x, as many as `sums` has elements, through `partial`; assigned to
// `sums` or added.
struct ColumnSums {
  View x, partial, sums;
  bool add;
};

constexpr int kMostColumnSums = 2;
// column_sums of `count` matrices of one type, in one launch or two.
void column_sums_of(const Launcher& launch, const ColumnSums* all, int count);

void column_sums(const Launcher& launch, const View& x, bool add, const View& partial,
                 const View& sums);

void counted_rows_product(const Launcher& launch, const View& a, const View& b,
                          const OptionalView& bias, const View& total, int64_t begin,
                          const View& out);

}  // namespace pruned_rnnt::cuda
