// A pruned step in the library: its sizes, its buffers and its parts.
#pragma once

#include <vector>

#include "cuda/common/ops.cuh"
#include "cuda/step/step_kernels.cuh"
#include "cuda/step/step_layout.cuh"

namespace pruned_rnnt::cuda {

struct PrunedStep {
  // Where rows are packed, the lengths are on the CPU, and `saved` has room for them on the device.
  PrunedStep(const Launcher& launch, const View& fields, const View& targets,
             const View& logit_lengths, const View& target_lengths, const View& saved_memory,
             const View& work_memory)
      : launch(launch),
        s(fields_in(fields)),
        saved(s, saved_memory.data_ptr()),
        work(s, work_memory.data_ptr()),
        targets(targets),
        logit_lengths(s.packed ? saved.logit_lengths : logit_lengths),
        target_lengths(s.packed ? saved.target_lengths : target_lengths),
        row_splits(s.packed ? OptionalView(saved.row_splits) : std::nullopt),
        am(saved.joiner_input[kEncoderSide]),
        lm(saved.joiner_input[kPredictorSide]) {}

  // Forward, pruned_step.cu.
  void prologue(const View& encoder, const View& predictor, const std::vector<Tensor>& layers,
                const View& frames, const View& symbols) const;
  void project(const View& x, Layer layer, const View& out) const;
  void simple_loss(const View& encoder, const View& predictor, const View& gx, const View& gy,
                   const View& start) const;
  void pruned_loss(const View& start) const;
  void chunk_logits(const View& start, int64_t begin, int64_t count) const;

  // Backward of the pruned loss, pruned_step_backward.cu.
  void rows_backward(const View& start, const View& sums) const;
  void hidden_backward(const View& start, int64_t begin, int64_t count) const;

  const Launcher& launch;
  const StepSizes s;
  const SavedBuffers saved;
  const WorkBuffers work;
  const View& targets;
  const View logit_lengths, target_lengths;
  const OptionalView row_splits;
  const View &am, &lm;  // the joiner's inputs
};

}  // namespace pruned_rnnt::cuda
