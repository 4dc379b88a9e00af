// What the two directions of a pruned step share.
#pragma once

#include <vector>

#include "cuda/blas.cuh"
#include "cuda/ops.cuh"
#include "cuda/step_kernels.cuh"
#include "cuda/step_layout.cuh"

namespace pruned_rnnt {
namespace cuda {

enum Layer { kAm, kLm, kEncoder, kDecoder, kOutput, kLayers };

struct Batch {
  const Tensor &targets, &logit_lengths, &target_lengths;
  const OptionalTensor& row_splits;
};

inline uint32_t segment_blocks(int64_t largest, int64_t vector) {
  const int64_t each = kSegmentThreads * vector;
  return static_cast<uint32_t>(std::clamp<int64_t>((largest + each - 1) / each, 1, 1024));
}

// Hidden rows and logits of a chunk, from `begin` on.
inline void chunk_logits(const Blas& blas, const StepSizes& s, const Batch& batch,
                         const Tensor& start, const Tensor& am, const Tensor& lm,
                         const Tensor& saved, const SavedLayout& kept, const Tensor& work,
                         const WorkLayout& layout, int64_t begin, int64_t count) {
  const Tensor hidden = layout.hidden.rows_in(work, 0, count);
  joiner_rows(am, lm, batch.logit_lengths, batch.target_lengths, start, batch.row_splits, s.T, s.S,
              begin, s.activation, hidden);
  blas.multiply_add_bias(layout.logits.rows_in(work, 0, count), kept.bias[kOutput].in(saved),
                         hidden, kept.weight[kOutput].transposed_in(saved));
}

}  // namespace cuda
}  // namespace pruned_rnnt
