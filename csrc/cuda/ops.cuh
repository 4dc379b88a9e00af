// The ops that the pruned step calls one after the other (pruned_step.cu). Their contracts are in
// the Python files of the same names.
#pragma once

#include "stable.h"

namespace pruned_rnnt {
namespace cuda {

void exp_rows(const Tensor& x, const Tensor& lengths, int64_t extra, const Tensor& row_max,
              const Tensor& row_lse, const Tensor& x_exp, const OptionalTensor& x_low);

void simple_product(const Tensor& am_exp, const OptionalTensor& am_low, const Tensor& lm_exp,
                    const OptionalTensor& lm_low, const Tensor& product);

void simple_sums(const Tensor& weights, const Tensor& am_exp, const OptionalTensor& am_low,
                 const Tensor& lm_exp, const OptionalTensor& lm_low, const OptionalTensor& lm_stack,
                 const Tensor& am_sum, const Tensor& lm_sum);

void simple_log_probs(const Tensor& am, const Tensor& lm, const Tensor& am_max,
                      const Tensor& lm_max, const Tensor& product, const OptionalTensor& lm_lse,
                      const OptionalTensor& am_lse, const OptionalTensor& log_q,
                      const Tensor& targets, const Tensor& logit_lengths,
                      const Tensor& target_lengths, int64_t blank, double lm_only_scale,
                      double am_only_scale, const Tensor& px, const Tensor& py, const Tensor& logz);

void simple_weights(const Tensor& grad_loss, const Tensor& gx, const Tensor& gy,
                    const Tensor& product, const Tensor& logit_lengths,
                    const Tensor& target_lengths, double scale, double fastemit_lambda,
                    const Tensor& weights);

void simple_backward(const Tensor& grad_loss, const Tensor& gx, const Tensor& gy, const Tensor& am,
                     const Tensor& lm, const Tensor& am_exp, const OptionalTensor& am_low,
                     const Tensor& lm_exp, const OptionalTensor& lm_low, const Tensor& product,
                     const Tensor& logz, const Tensor& am_sum, const Tensor& lm_sum,
                     const OptionalTensor& lm_lse, const OptionalTensor& am_lse,
                     const OptionalTensor& log_q, const Tensor& targets,
                     const Tensor& logit_lengths, const Tensor& target_lengths, int64_t blank,
                     double lm_only_scale, double am_only_scale, double fastemit_lambda,
                     const Tensor& grad_am, const Tensor& grad_lm);

void band_lattice(const Tensor& px, const Tensor& py, const Tensor& logit_lengths,
                  const Tensor& target_lengths, const OptionalTensor& start,
                  const OptionalTensor& row_splits, int64_t T, int64_t S, int64_t rnnt_type,
                  double delay_penalty, const Tensor& alpha, const Tensor& beta,
                  const Tensor& total, const Tensor& gx, const Tensor& gy);

void prune_bounds(const Tensor& gx, const Tensor& gy, const Tensor& logit_lengths,
                  const Tensor& target_lengths, int64_t s_range, int64_t rnnt_type,
                  bool padded_search, const Tensor& start);

void prune_bounds_exact(const Tensor& gx, const Tensor& gy, const Tensor& logit_lengths,
                        const Tensor& target_lengths, int64_t s_range, int64_t rnnt_type,
                        const Tensor& scratch, const Tensor& start);

void log_probs(const Tensor& logits, const Tensor& targets, const Tensor& logit_lengths,
               const Tensor& target_lengths, const OptionalTensor& start,
               const OptionalTensor& row_splits, int64_t T, int64_t S, int64_t row_begin,
               int64_t blank, int64_t mode_number, const Tensor& px, const Tensor& py,
               const Tensor& lse);

void log_probs_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& lse,
                        const Tensor& gx, const Tensor& gy, const Tensor& targets,
                        const Tensor& logit_lengths, const Tensor& target_lengths,
                        const OptionalTensor& start, const OptionalTensor& row_splits, int64_t T,
                        int64_t S, int64_t row_begin, int64_t blank, int64_t mode_number,
                        double fastemit_lambda, double clamp, const Tensor& grad_logits);

void joiner_rows(const Tensor& am, const Tensor& lm, const Tensor& logit_lengths,
                 const Tensor& target_lengths, const OptionalTensor& start,
                 const OptionalTensor& row_splits, int64_t T, int64_t S, int64_t row_begin,
                 int64_t activation, const Tensor& hidden);

void joiner_rows_backward(const Tensor& grad_hidden, const Tensor& hidden,
                          const Tensor& logit_lengths, const Tensor& target_lengths,
                          const OptionalTensor& start, const OptionalTensor& row_splits, int64_t T,
                          int64_t S, int64_t row_begin, int64_t activation, const Tensor& grad_am,
                          const Tensor& grad_lm);

void column_sums(const Tensor& x, bool add, const Tensor& partial, const Tensor& sums);

}  // namespace cuda
}  // namespace pruned_rnnt
