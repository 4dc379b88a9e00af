// Host functions of TDT that the pruned step calls (cuda/step/tdt_step.cu). Contracts: the Python
// files of the same names.
#pragma once

#include <vector>

#include "args/rows.h"
#include "cuda/common/device_op.cuh"

namespace pruned_rnnt::cuda {

// What the durations (R,K) of tdt_recursion are; kBlanks: as with multi_blank.
enum class DurationScores { kLogits, kLogProbs, kBlanks };

// tdt_lattice.
void tdt_recursion(const Launcher& launch, const View& px, const View& py, const View& durations,
                   DurationScores scores, const LatticeRows& lattice, int64_t symbols,
                   const std::vector<int64_t>& table, double sigma, double delay_penalty,
                   const View& work, const TdtSums& sums);

void duration_gradient(const Launcher& launch, const View& grad_loss, const View& duration_logits,
                       const View& gd, const LatticeRows& lattice, int64_t row_begin, double clamp,
                       const View& grad);

}  // namespace pruned_rnnt::cuda
