// A pruned step in the library: its sizes, its buffers and its parts.
#pragma once

#include <vector>

#include "cuda/common/ops.cuh"
#include "cuda/step/step_kernels.cuh"
#include "cuda/step/step_layout.cuh"

namespace pruned_rnnt::cuda {

// The durations of TDT, and the occupancies of the simple loss that only TDT has; nothing without.
struct TdtPart {
  std::vector<int64_t> table;
  OptionalView stay, gd;
};

// uint8 memory that forward leaves for backward: StepBuffers in step_library.py.
PRUNED_RNNT_VIEWS(StepMemory, 2, saved, work)

struct PrunedStep {
  // Where rows are packed, the lengths are on the CPU, and `saved` has room for them on the device.
  PrunedStep(const Launcher& launch, const View& fields, const TargetsAndLengths& given,
             const StepMemory& memory)
      : launch(launch),
        s(fields_in(fields)),
        saved(s, memory.saved.data_ptr()),
        work(s, memory.work.data_ptr()),
        utterances{given.targets, s.packed ? saved.logit_lengths : given.logit_lengths,
                   s.packed ? saved.target_lengths : given.target_lengths},
        row_splits(s.packed ? OptionalView(saved.row_splits) : std::nullopt),
        am(saved.joiner_input[kEncoderSide]),
        lm(saved.joiner_input[kPredictorSide]) {
    STD_TORCH_CHECK(saved.bytes <= memory.saved.numel() && work.bytes <= memory.work.numel(),
                    "pruned_rnnt: a pruned step needs ", saved.bytes, " bytes of `saved` and ",
                    work.bytes, " of `work`, but has ", memory.saved.numel(), " and ",
                    memory.work.numel());
  }

  LatticeRows whole() const {
    return {utterances.logit_lengths, utterances.target_lengths, {}, {}, s.T, s.W};
  }
  LatticeRows band(const View& start) const {
    return {utterances.logit_lengths, utterances.target_lengths, start, row_splits, s.T, s.S};
  }

  // Forward, pruned_step.cu.
  void prologue(const View& encoder, const View& predictor, const std::vector<Tensor>& layers,
                const View& frames, const View& symbols) const;
  void project(const View& x, Layer layer, const View& out) const;
  void simple_loss(const View& encoder, const View& predictor, const View& gx, const View& gy,
                   const View& start, const TdtPart& tdt) const;
  void pruned_loss(const View& start, const TdtPart& tdt) const;
  void chunk_logits(const View& start, int64_t begin, int64_t count) const;

  // What TDT does in other ways, tdt_step.cu. The first two are of the simple loss; left and stayed
  // are what prune_bounds reads for blanks and emits.
  void tdt_simple_lattice(const View& gx, const View& gy, const TdtPart& tdt) const;
  void tdt_simple_gradient(const View& gd) const;
  void tdt_window_masses(const View& gx, const View& gy, const View& stay) const;
  void tdt_chunk_durations(int64_t begin, int64_t count) const;
  void tdt_band_lattice(const View& start, const TdtPart& tdt) const;
  void tdt_chunk_gradient(const View& start, int64_t begin, int64_t count) const;

  // Backward of the pruned loss, pruned_step_backward.cu.
  void rows_backward(const View& start, const View& sums) const;
  void hidden_backward(const View& start, int64_t begin, int64_t count) const;

  const Launcher& launch;
  const StepSizes s;
  const SavedBuffers saved;
  const WorkBuffers work;
  const TargetsAndLengths utterances;
  const OptionalView row_splits;
  const View &am, &lm;  // the joiner's inputs
};

}  // namespace pruned_rnnt::cuda
