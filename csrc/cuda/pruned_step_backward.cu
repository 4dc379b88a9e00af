// pruned_step_rows_backward, pruned_step_layers_backward: the gradients of a pruned step. Contract:
// pruned_rnnt/ops/native_step.py. Two calls, so that the caller can give memory back between them.
//
// Axes: N batch, T frames, W = U+1 lattice columns, V vocabulary, D joiner dim, S band, R rows.
#include "cuda/step.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

// The pruned loss back to the joiner's inputs and its output layer.
void pruned_step_rows_backward(const OptionalTensor& grad_total, const OptionalTensor& grad_simple,
                               const OptionalTensor& grad_pruned, const Tensor& targets,
                               const Tensor& logit_lengths, const Tensor& target_lengths,
                               const OptionalTensor& row_splits, const Tensor& start,
                               std::vector<int64_t> size_list, std::vector<double> scale_list,
                               const Tensor& saved, bool work_is_kept, const Tensor& work,
                               const Tensor& scratch, const Tensor& gradients,
                               const Tensor& grad_weight, const Tensor& grad_bias) {
  const StepSizes s(size_list);
  const StepScales scales(scale_list);
  const SavedLayout kept(s);
  const WorkLayout layout(s);
  const GradientLayout out(s);
  const RowScratchLayout own(s);
  const Batch batch{targets, logit_lengths, target_lengths, row_splits};
  const Launcher launch(saved);
  const Blas blas;

  const Tensor upstream = out.upstream.part(1).in(gradients);
  dispatch_accumulator(s.acc, "pruned_step_rows_backward", [&](auto zero) {
    using real = decltype(zero);
    launch(upstream_kernel<real>, 1, kSegmentThreads, 0, data_or_null<real>(grad_total),
           data_or_null<real>(grad_simple), data_or_null<real>(grad_pruned), s.reduced != 0 ? 0 : 1,
           static_cast<int32_t>(s.N), static_cast<real>(scales.simple),
           static_cast<real>(scales.pruned),
           s.reduced == 2 ? real(1) / static_cast<real>(s.N) : real(1),
           mutable_data_of<real>(out.upstream.in(gradients)));
  });
  const Tensor am = kept.am.in(saved), lm = kept.lm.in(saved), lse = kept.lse.in(saved);
  const Tensor gx = kept.gx.in(saved), gy = kept.gy.in(saved);
  const Tensor grad_am = out.am.in(gradients), grad_lm = own.lm.in(scratch);
  for (const Tensor* sums : {&grad_am, &grad_lm}) {
    check(cudaMemsetAsync(sums->data_ptr(), 0, sums->numel() * element_bytes(sums->scalar_type()),
                          launch.stream()),
          "clearing a gradient");
  }
  const Matrix weight = matrix_of(kept.weight[kOutput].in(saved));
  // From the end, where the forward pass has left the last chunk.
  const int64_t last = (s.rows - 1) / s.chunk_rows * s.chunk_rows;
  for (int64_t begin = last; begin >= 0; begin -= s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, s.rows - begin);
    const bool add = begin < last;
    if (add || !work_is_kept) {
      chunk_logits(blas, s, batch, start, am, lm, saved, kept, work, layout, begin, count);
    }
    const Tensor logits = layout.logits.rows_in(work, 0, count);
    log_probs_backward(upstream, layout.logits.rows_in(work, 0, count, s.V), lse, gx, gy, targets,
                       logit_lengths, target_lengths, start, row_splits, s.T, s.S, begin, s.blank,
                       s.mode, scales.fastemit_lambda, scales.clamp, logits);
    const Tensor hidden = layout.hidden.rows_in(work, 0, count);
    blas.multiply(matrix_of(grad_weight), matrix_of(logits).t(), matrix_of(hidden), s.padded_V, s.D,
                  count, add);
    column_sums(logits, add, own.partial_of(scratch, count, s), grad_bias);
    for (int64_t first = 0; first < count; first += s.hidden_rows) {
      const int64_t piece = std::min(s.hidden_rows, count - first);
      const Tensor grad_hidden = own.hidden.rows_in(scratch, 0, piece);
      blas.multiply(matrix_of(grad_hidden), matrix_of(layout.logits.rows_in(work, first, piece)),
                    weight, piece, s.D, s.padded_V);
      joiner_rows_backward(grad_hidden, layout.hidden.rows_in(work, first, piece), logit_lengths,
                           target_lengths, start, row_splits, s.T, s.S, begin + first, s.activation,
                           grad_am, grad_lm);
    }
  }
  Segments segments{};
  const Tensor cast_lm = out.lm.in(gradients);
  segments.all[0] = {grad_lm.data_ptr(), cast_lm.data_ptr(), grad_lm.numel(), grad_lm.numel(), 0.0f,
                     s.type != s.acc};
  dispatch_floating(s.type, "pruned_step_rows_backward", [&](auto zero) {
    launch(cast_segments_kernel<decltype(zero)>, dim3(segment_blocks(grad_lm.numel(), 2), 1),
           kSegmentThreads, 0, segments);
  });
}

// All layers back to the inputs; nothing is computed for an output that is not wanted.
void pruned_step_layers_backward(
    const Tensor& encoder, const Tensor& predictor, std::vector<int64_t> size_list,
    const Tensor& saved, const Tensor& gradients, const Tensor& scratch,
    const OptionalTensor& grad_encoder, const OptionalTensor& grad_predictor,
    const OptionalTensor& am_weight, const OptionalTensor& am_bias, const OptionalTensor& lm_weight,
    const OptionalTensor& lm_bias, const OptionalTensor& encoder_weight,
    const OptionalTensor& encoder_bias, const OptionalTensor& decoder_weight,
    const OptionalTensor& decoder_bias) {
  const StepSizes s(size_list);
  const SavedLayout kept(s);
  const GradientLayout given(s);
  const LayerScratchLayout own(s);
  const Launcher launch(saved);
  const Blas blas;
  const Tensor simple[] = {own.am.matrix_in(scratch), own.lm.matrix_in(scratch)};
  dispatch_floating(s.type, "pruned_step_layers_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const Tensor units[] = {kept.unit_am.in(saved), kept.unit_lm.in(saved)};
    ScaledSides<scalar> sides{};
    for (int i = 0; i < 2; ++i) {
      sides.unit[i] = data_of<scalar>(units[i]);
      sides.gradient[i] = mutable_data_of<scalar>(simple[i]);
      sides.sizes[i] = (i == 0 ? s.T : s.W) * s.padded_V;
    }
    constexpr int width = 16 / sizeof(scalar);
    const int64_t blocks = segment_blocks(std::max(s.T, s.W) * s.padded_V, width);
    launch(scale_sides_kernel<scalar, width>,
           dim3(static_cast<uint32_t>(std::min<int64_t>(blocks, 64)), 2, s.N), kSegmentThreads, 0,
           sides, data_of<acc_type<scalar>>(given.upstream.in(gradients)));
  });
  const Tensor joiner[] = {given.am.matrix_in(gradients), given.lm.matrix_in(gradients)};
  const Tensor inputs[] = {s.cast_encoder ? kept.encoder.in(saved) : encoder,
                           s.cast_predictor ? kept.predictor.in(saved) : predictor};
  const OptionalTensor* input_gradients[] = {&grad_encoder, &grad_predictor};
  const OptionalTensor* weight_gradients[] = {&am_weight, &lm_weight, &encoder_weight,
                                              &decoder_weight};
  const OptionalTensor* bias_gradients[] = {&am_bias, &lm_bias, &encoder_bias, &decoder_bias};
  for (int side = 0; side < 2; ++side) {
    const int64_t rows = s.N * (side == 0 ? s.T : s.W), columns = side == 0 ? s.E : s.P;
    const Tensor* grads[] = {&simple[side], &joiner[side]};
    for (int branch = 0; branch < 2; ++branch) {
      const int layer = side + 2 * branch;
      const int64_t outputs = s.outputs_of(layer);
      const Matrix grad = matrix_of(*grads[branch]);
      if (input_gradients[side]->has_value()) {
        Matrix out = matrix_of(**input_gradients[side]);
        blas.multiply(out, grad, matrix_of(kept.weight[layer].in(saved)), rows, columns, outputs,
                      branch == 1);
      }
      if (weight_gradients[layer]->has_value()) {
        blas.multiply(matrix_of(**weight_gradients[layer]), grad.t(), matrix_of(inputs[side]),
                      outputs, columns, rows);
      }
      if (bias_gradients[layer]->has_value()) {
        column_sums(*grads[branch], false, own.partial_of(scratch, rows, outputs),
                    **bias_gradients[layer]);
      }
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("pruned_step_rows_backward", TORCH_BOX(&pruned_step_rows_backward));
  m.impl("pruned_step_layers_backward", TORCH_BOX(&pruned_step_layers_backward));
}

}  // namespace cuda
}  // namespace pruned_rnnt
