// What the directions of a pruned step share.
#pragma once

#include "cuda/common/ops.cuh"
#include "cuda/step/step_kernels.cuh"
#include "cuda/step/step_layout.cuh"

namespace pruned_rnnt {
namespace cuda {

inline uint32_t segment_blocks(int64_t largest, int64_t vector) {
  const int64_t each = kSegmentThreads * vector;
  return static_cast<uint32_t>(std::clamp<int64_t>((largest + each - 1) / each, 1, 1024));
}

// The band of a step: its sizes and buffers, and where its utterances are.
struct BandStep {
  // Lengths are on the host where rows are packed; then their place on the device is in `saved`.
  BandStep(const Launcher& launch, const View& sizes, const View& scales, const View& targets,
           const View& logit_lengths, const View& target_lengths, const View& saved,
           const View& work)
      : launch(launch),
        s(sizes),
        scales(scales),
        kept(s),
        layout(s),
        saved(saved),
        work(work),
        targets(targets),
        logit_lengths(s.packed ? kept.logit_lengths.in(saved) : logit_lengths),
        target_lengths(s.packed ? kept.target_lengths.in(saved) : target_lengths),
        row_splits(s.packed ? OptionalView(kept.row_splits.in(saved)) : std::nullopt),
        am(kept.joiner_input(kEncoderSide, saved)),
        lm(kept.joiner_input(kPredictorSide, saved)) {}

  // Hidden rows and logits of a chunk, from `begin` on.
  void chunk_logits(const View& start, int64_t begin, int64_t count) const {
    const View hidden = layout.hidden.rows_in(work, 0, count);
    const View logits = layout.logits.rows_in(work, 0, count);
    joiner_rows(launch, am, lm, logit_lengths, target_lengths, start, row_splits, s.T, s.S, begin,
                s.activation, hidden);
    launch.blas().multiply_add_bias(
        matrix_of(logits), kept.bias[kOutput].in(saved), matrix_of(hidden),
        matrix_of(kept.weight[kOutput].in(saved)).t(), count, s.padded_V, s.D);
  }

  // The share of an utterance's losses in the reduced ones.
  template <typename real>
  real share() const {
    return s.reduced == 2 ? real(1) / static_cast<real>(s.N) : real(1);
  }

  const Launcher& launch;
  const StepSizes s;
  const StepScales scales;
  const SavedLayout kept;
  const WorkLayout layout;
  const View &saved, &work, &targets;
  const View logit_lengths, target_lengths;
  const OptionalView row_splits;
  const View am, lm;
};

// The pruned loss back to the outputs of the joiner's first layers, and to its last layer: `sums`.
// What reaches the losses is in `saved`; work is as the losses have left it, and is spent.
void rows_backward(const BandStep& step, const View& start, const View& sums);

}  // namespace cuda
}  // namespace pruned_rnnt
