// pruned_step_rows_backward, pruned_step_layers_backward: the gradients of a pruned step. Contract:
// pruned_rnnt/ops/step/step_library.py. Two calls, so that the caller can give memory back between
// them.
//
// Axes: N batch, T frames, W = U+1 lattice columns, V vocabulary, D joiner dim, S band, R rows.
#include "cuda/step/step.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

// `count` elements of a vector, or a matrix (rows,columns), from `begin` on.
View part_of(const View& memory, int64_t begin, int64_t count) {
  char* const data = static_cast<char*>(memory.data_ptr());
  const ScalarType type = memory.scalar_type();
  return {data + begin * element_bytes(type), type, 1, {count}, {1}};
}
Matrix matrix_at(const View& memory, int64_t begin, int64_t columns) {
  const View start = part_of(memory, begin, 0);
  return {start.data_ptr(), start.scalar_type(), columns};
}

// Gradients of the logits of a chunk to those of its hidden rows, and on to the joiner's inputs.
void hidden_backward(const BandStep& step, const View& start, int64_t begin, int64_t count,
                     const View& grad_am, const View& grad_lm) {
  const StepSizes& s = step.s;
  const WorkLayout& layout = step.layout;
  const Matrix weight = matrix_of(step.kept.weight[kOutput].in(step.saved));
  // Rows from `from` to `done` have a gradient, which has room for so many rows before it reaches
  // logits that are not read: in a wide vocabulary soon for all. Whole frames are taken.
  int64_t from = 0, done = 0;
  while (from < count) {
    const int64_t end = std::min(count, (from + layout.hidden_rows_after(done)) / s.S * s.S);
    if (done < count && (done == from || end == count || end - done >= layout.first_rows / 4)) {
      step.launch.blas().multiply(
          matrix_of(layout.grad_hidden.rows_in(step.work, done - from, end - done)),
          matrix_of(layout.logits.rows_in(step.work, done, end - done)), weight, end - done, s.D,
          s.padded_V);
      done = end;
      continue;
    }
    joiner_rows_backward(step.launch, layout.grad_hidden.rows_in(step.work, 0, done - from),
                         layout.hidden.rows_in(step.work, from, done - from), step.logit_lengths,
                         step.target_lengths, start, step.row_splits, s.T, s.S, begin + from,
                         s.activation, grad_am, grad_lm);
    from = done;
  }
}

void pruned_step_rows_backward(const Launcher& launch, const OptionalView& grad_total,
                               const OptionalView& grad_simple, const OptionalView& grad_pruned,
                               const View& targets, const View& logit_lengths,
                               const View& target_lengths, const View& start, const View& sizes,
                               const View& scales, const View& saved, const View& work,
                               const View& sums) {
  const BandStep step(launch, sizes, scales, targets, logit_lengths, target_lengths, saved, work);
  const StepSizes& s = step.s;
  dispatch_accumulator(s.acc, "pruned_step_rows_backward", [&](auto zero) {
    using real = decltype(zero);
    launch(upstream_kernel<real>, 1, kSegmentThreads, 0, data_or_null<real>(grad_total),
           data_or_null<real>(grad_simple), data_or_null<real>(grad_pruned), s.reduced != 0 ? 0 : 1,
           static_cast<int32_t>(s.N), static_cast<real>(step.scales.simple),
           static_cast<real>(step.scales.pruned), step.share<real>(),
           mutable_data_of<real>(step.kept.upstream.in(saved)));
  });
  rows_backward(step, start, sums);
}

// The gradients of the trivial joiner, times what reaches each utterance's loss.
void scale_simple(const Launcher& launch, const StepSizes& s, const SavedLayout& kept,
                  const View& saved) {
  dispatch_floating(s.type, "pruned_step_layers_backward", [&](auto zero) {
    using scalar = decltype(zero);
    PitchedSides<scalar> sides;
    for (const int side : {kEncoderSide, kPredictorSide}) {
      sides.all[side] = {mutable_data_of<scalar>(kept.outputs[side].in(saved)), s.length_of(side),
                         s.side_outputs(), static_cast<int32_t>(s.padded_V)};
    }
    const auto* upstream = data_of<acc_type<scalar>>(kept.upstream.in(saved));
    const uint32_t blocks = static_cast<uint32_t>(std::min<int64_t>(std::max(s.T, s.W), 256));
    // Rows are as far apart as the joiner's width leaves them.
    constexpr int widest = 16 / sizeof(scalar);
    if (s.D % widest == 0) {
      launch(scale_rows_kernel<scalar, widest>, dim3(blocks, kSides, s.N), kSegmentThreads, 0,
             sides, upstream);
    } else {
      launch(scale_rows_kernel<scalar, 1>, dim3(blocks, kSides, s.N), kSegmentThreads, 0, sides,
             upstream);
    }
  });
}

// All layers back to the inputs; nothing is computed for a side's layers or input that is not
// wanted.
void pruned_step_layers_backward(const Launcher& launch, const View& encoder, const View& predictor,
                                 const View& sizes, const View& saved,
                                 const OptionalView& grad_encoder,
                                 const OptionalView& grad_predictor,
                                 const OptionalView& encoder_weights,
                                 const OptionalView& predictor_weights, const View& sums) {
  const StepSizes s(sizes);
  const SavedLayout kept(s);
  const SumLayout places(s);
  if (!s.at_once) scale_simple(launch, s, kept, saved);
  const View inputs[] = {kept.input_of(kEncoderSide, encoder, saved),
                         kept.input_of(kPredictorSide, predictor, saved)};
  const OptionalView* input_gradients[] = {&grad_encoder, &grad_predictor};
  const OptionalView* weight_gradients[] = {&encoder_weights, &predictor_weights};
  std::array<ColumnSums, kMostColumnSums> biases{};
  int count = 0;
  const int64_t outputs = s.side_outputs();
  for (const int side : {kEncoderSide, kPredictorSide}) {
    const int64_t rows = s.rows_of(side), columns = s.columns_of(side);
    const Matrix gradient = matrix_of(kept.outputs[side].in(saved));
    if (input_gradients[side]->has_value()) {
      launch.blas().multiply(matrix_of(**input_gradients[side]), gradient,
                             matrix_of(kept.weights[side].in(saved)), rows, columns, outputs);
    }
    if (!weight_gradients[side]->has_value()) continue;
    launch.blas().multiply(matrix_of(**weight_gradients[side]), gradient.t(),
                           matrix_of(inputs[side]), outputs, columns, rows);
    biases[count++] = {View(gradient.data, gradient.type, 2, {rows, outputs}, {outputs, 1}),
                       kept.partial[side].in(saved), part_of(sums, places.biases[side], outputs),
                       false};
  }
  column_sums_of(launch, biases.data(), count);
}

}  // namespace

void rows_backward(const BandStep& step, const View& start, const View& sums) {
  const Launcher& launch = step.launch;
  const StepSizes& s = step.s;
  const WorkLayout& layout = step.layout;
  const View &saved = step.saved, &work = step.work;
  const View upstream = step.kept.upstream.part(1).in(saved);
  const View lse = step.kept.lse.in(saved);
  const View gx = step.kept.gx.in(saved), gy = step.kept.gy.in(saved);
  // In the place of am, chunk by chunk. Frames without rows have been cleared by the simple loss.
  const View& grad_am = step.am;
  const View grad_lm = step.kept.lm_sums.in(saved);
  const Matrix grad_weight = matrix_at(sums, 0, s.D);
  const View grad_bias = part_of(sums, SumLayout(s).output_bias, s.padded_V);
  // From the end, where the losses have left the last chunk.
  const int64_t last = (s.rows - 1) / s.chunk_rows * s.chunk_rows;
  for (int64_t begin = last; begin >= 0; begin -= s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, s.rows - begin);
    const bool add = begin < last;
    if (add) step.chunk_logits(start, begin, count);
    const View padded = layout.logits.rows_in(work, 0, count);
    const View logits = layout.logits.rows_in(work, 0, count, s.V);
    log_probs_backward(launch, upstream, logits, lse, gx, gy, step.targets, step.logit_lengths,
                       step.target_lengths, start, step.row_splits, s.T, s.S, begin, s.blank,
                       s.mode, step.scales.fastemit_lambda, step.scales.clamp, padded);
    const View hidden = layout.hidden.rows_in(work, 0, count);
    launch.blas().multiply(grad_weight, matrix_of(padded).t(), matrix_of(hidden), s.padded_V, s.D,
                           count, add);
    column_sums(launch, padded, add, layout.partial_in(work, count), grad_bias);
    hidden_backward(step, start, begin, count, grad_am, grad_lm);
  }
  dispatch_floating(s.type, "pruned_step_rows_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const PitchedRows<scalar> rows{mutable_data_of<scalar>(step.lm), s.N * s.W, s.side_outputs(),
                                   static_cast<int32_t>(s.D)};
    launch(cast_rows_kernel<scalar>, static_cast<uint32_t>(std::min<int64_t>(rows.rows, 4096)),
           kSegmentThreads, 0, data_of<acc_type<scalar>>(grad_lm), rows);
  });
}

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("pruned_step_rows_backward", TORCH_BOX(&DeviceOp<&pruned_step_rows_backward>::call));
  m.impl("pruned_step_layers_backward", TORCH_BOX(&DeviceOp<&pruned_step_layers_backward>::call));
}

}  // namespace cuda
}  // namespace pruned_rnnt
