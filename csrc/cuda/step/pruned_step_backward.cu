// pruned_step_rows_backward, pruned_step_layers_backward: the gradients of a pruned step. Contract:
// pruned_rnnt/ops/step/step_library.py. Two calls, so that the caller can give memory back between
// them.
//
// Axes: N batch, T frames, W = U+1 lattice columns, V vocabulary, D joiner dim, S band, R rows.
#include "cuda/step/step.cuh"
#include "cuda/step/step_contracts.cuh"

namespace pruned_rnnt::cuda {

// Gradients of the logits of a chunk to those of its hidden rows, and on to the joiner's inputs.
void PrunedStep::hidden_backward(const View& start, int64_t begin, int64_t count) const {
  const Matrix weight = matrix_of(saved.weight[kOutput]);
  // Rows from `from` to `done` have a gradient. It has room for so many rows before it reaches
  // logits that are not read: in a wide vocabulary soon for all. Whole frames are taken.
  int64_t from = 0, done = 0;
  while (from < count) {
    const int64_t end = std::min(count, (from + work.hidden_rows_after(done)) / s.S * s.S);
    if (done < count && (done == from || end == count || end - done >= work.first_rows / 4)) {
      launch.blas().multiply(matrix_of(rows_of(work.grad_hidden, done - from, end - done)),
                             matrix_of(rows_of(work.logits, done, end - done)), weight, end - done,
                             s.D, s.padded_O);
      done = end;
      continue;
    }
    joiner_rows_backward(launch, rows_of(work.grad_hidden, 0, done - from),
                         rows_of(work.hidden, from, done - from), band(start), begin + from,
                         s.activation, am, saved.lm_sums);
    from = done;
  }
}

// The gradients of the pruned loss with respect to the joiner's inputs, in their memory, and to the
// output layer, in `sums`. saved.upstream holds the gradients of the losses; `work` is as the
// losses have left it, and is overwritten.
void PrunedStep::rows_backward(const View& start, const View& sums) const {
  const SumBuffers sum_buffers(s, sums.data_ptr());
  const View upstream = part_of(saved.upstream, 1);
  // From the end, where the losses have left the last chunk.
  const int64_t last = (s.rows - 1) / s.chunk_rows * s.chunk_rows;
  for (int64_t begin = last; begin >= 0; begin -= s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, s.rows - begin);
    const bool add = begin < last;
    if (add) chunk_logits(start, begin, count);
    const View padded = rows_of(work.logits, 0, count);
    log_probs_backward(launch, upstream, rows_of(work.logits, 0, count, s.V),
                       {saved.lse, saved.gx, saved.gy}, utterances.targets, band(start), begin,
                       {s.blank, s.mode, s.fastemit_lambda, s.clamp}, padded);
    if (s.is_tdt()) tdt_chunk_gradient(start, begin, count);
    launch.blas().multiply(matrix_of(sum_buffers.weight), matrix_of(padded).t(),
                           matrix_of(work.hidden), s.padded_O, s.D, count, add);
    column_sums(launch, padded, add, rows_of(work.partial, 0, parts_of(count, s.padded_O)),
                sum_buffers.bias);
    // Writes the gradient of am in the place of am. The simple loss has cleared frames without
    // rows.
    hidden_backward(start, begin, count);
  }
  dispatch_floating(s.type, "pruned_step_rows_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const PitchedRows<scalar> rows{mutable_data_of<scalar>(lm), s.N * s.W, s.side_outputs(),
                                   static_cast<int32_t>(s.D)};
    launch(cast_rows_kernel<scalar>, static_cast<uint32_t>(std::min<int64_t>(rows.rows, 4096)),
           kSegmentThreads, 0, data_of<acc_type<scalar>>(saved.lm_sums), rows);
  });
}

namespace {

void pruned_step_rows_backward(const Launcher& launch, const OptionalView& grad_total,
                               const OptionalView& grad_simple, const OptionalView& grad_pruned,
                               const TargetsAndLengths& utterances, const View& start,
                               const View& fields, const StepMemory& memory, const View& sums) {
  const PrunedStep step(launch, fields, utterances, memory);
  const StepSizes& s = step.s;
  dispatch_accumulator(s.acc, "pruned_step_rows_backward", [&](auto zero) {
    using real = decltype(zero);
    launch(upstream_kernel<real>, 1, kSegmentThreads, 0, data_or_null<real>(grad_total),
           data_or_null<real>(grad_simple), data_or_null<real>(grad_pruned),
           s.reduction == kNone ? 1 : 0, static_cast<int32_t>(s.N),
           static_cast<real>(s.simple_scale), static_cast<real>(s.pruned_scale), s.share<real>(),
           mutable_data_of<real>(step.saved.upstream));
  });
  step.rows_backward(start, sums);
}

// The gradients of the simple loss times the gradient of each utterance's loss.
void scale_simple(const Launcher& launch, const StepSizes& s, const SavedBuffers& saved) {
  dispatch_floating(s.type, "pruned_step_layers_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const uint32_t blocks = static_cast<uint32_t>(std::min<int64_t>(std::max(s.T, s.W), 256));
    // Rows are as far apart as the joiner's width leaves them.
    constexpr int widest = 16 / sizeof(scalar);
    PitchedSides<scalar> sides;
    const auto scale = [&](const View(&outputs)[kSides], int64_t columns) {
      for (const int side : {kEncoderSide, kPredictorSide}) {
        sides[side] = {mutable_data_of<scalar>(outputs[side]), s.length_of(side), s.side_outputs(),
                       static_cast<int32_t>(columns)};
      }
      launch(s.D % widest == 0 ? scale_rows_kernel<scalar, widest> : scale_rows_kernel<scalar, 1>,
             dim3(blocks, kSides, s.N), kSegmentThreads, 0, sides,
             data_of<acc_type<scalar>>(saved.upstream));
    };
    scale(saved.outputs, s.padded_V);
    if (s.is_tdt()) scale(saved.duration_input, s.padded_K);
  });
}

// All layers back to the inputs; nothing is computed for a side's layers or input that is not
// wanted.
void pruned_step_layers_backward(const Launcher& launch, const View& encoder, const View& predictor,
                                 const View& fields, const View& saved_memory,
                                 const OptionalView& grad_encoder,
                                 const OptionalView& grad_predictor,
                                 const OptionalView& encoder_weights,
                                 const OptionalView& predictor_weights, const View& sums) {
  const StepSizes s(fields_in(fields));
  const SavedBuffers saved(s, saved_memory.data_ptr());
  STD_TORCH_CHECK(saved.bytes <= saved_memory.numel(), "pruned_rnnt: a pruned step needs ",
                  saved.bytes, " bytes of `saved`, but has ", saved_memory.numel());
  const SumBuffers sum_buffers(s, sums.data_ptr());
  if (!s.grads_in_forward) scale_simple(launch, s, saved);
  const View* inputs[] = {&encoder, &predictor};
  const OptionalView* input_gradients[] = {&grad_encoder, &grad_predictor};
  const OptionalView* weight_gradients[] = {&encoder_weights, &predictor_weights};
  std::array<ColumnSums, kMostColumnSums> biases{};
  int count = 0;
  const int64_t outputs = s.side_outputs();
  for (const int side : {kEncoderSide, kPredictorSide}) {
    const int64_t rows = s.rows_of(side), columns = s.inputs_of(side);
    const View gradient = rows_of(saved.outputs[side], 0, rows);
    if (input_gradients[side]->has_value()) {
      launch.blas().multiply(matrix_of(**input_gradients[side]), matrix_of(gradient),
                             matrix_of(saved.weights[side]), rows, columns, outputs);
    }
    if (!weight_gradients[side]->has_value()) continue;
    launch.blas().multiply(matrix_of(**weight_gradients[side]), matrix_of(gradient).t(),
                           matrix_of(saved.input_of(side, *inputs[side])), outputs, columns, rows);
    biases[count++] = {gradient, saved.partial[side], sum_buffers.biases[side], false};
  }
  column_sums_of(launch, biases.data(), count);
}

}  // namespace

PRUNED_RNNT_CUDA_OP(pruned_step_rows_backward)
PRUNED_RNNT_CUDA_OP(pruned_step_layers_backward)

}  // namespace pruned_rnnt::cuda
