// Host functions of the ops over active rows, which active_gradients and packed_log_probs call.
// Contracts: pruned_rnnt/ops/joiner/active_rows.py.
#pragma once

#include "args/joiner.h"
#include "cuda/common/ops.cuh"

namespace pruned_rnnt::cuda {

// The active rows, and the chunks of them: active_chunk.cuh.
PRUNED_RNNT_VIEWS(ActiveLists, 5, listed, places, begins, utterances, frames)

void list_active_rows(const Launcher& launch, const View& gx, const View& gy, const View& total,
                      const LatticeRows& lattice, double fastemit_lambda, double left_out,
                      int64_t chunk_rows, const View& limits, const View& found,
                      const ActiveLists& lists, const View& block_ends);

void active_joiner_rows(const Launcher& launch, const View& am, const View& lm,
                        const LatticeRows& lattice, const ActiveLists& lists, int64_t k,
                        int64_t activation, const View& hidden);

void active_log_probs_backward(const Launcher& launch, const View& grad_loss,
                               const RowStatistics& statistics, const View& targets,
                               const LatticeRows& lattice, const ActiveLists& lists, int64_t k,
                               int64_t vocabulary, const GradientOptions& options,
                               const View& logits, const View& sums);

void active_joiner_rows_backward(const Launcher& launch, const View& grad_hidden,
                                 const View& hidden, const LatticeRows& lattice,
                                 const ActiveLists& lists, int64_t k, int64_t activation,
                                 const View& grad_am, const View& grad_lm);

// (V',D+8): weight (V',D), bias (V') and zeros, the factors of hidden rows with their 1 and zeros.
Tensor weight_and_bias(const Launcher& launch, const Tensor& weight, const Tensor& bias);

}  // namespace pruned_rnnt::cuda
