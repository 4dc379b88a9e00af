// pruned_step_rows_backward, pruned_step_layers_backward: the gradients of a pruned step. Contract:
// pruned_rnnt/ops/native_step.py. Two calls, so that the caller can give memory back between them.
//
// Axes: N batch, T frames, W = U+1 lattice columns, V vocabulary, D joiner dim, S band, R rows.
#include "cuda/step.cuh"

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

// The pruned loss back to the joiner's inputs and its output layer.
void pruned_step_rows_backward(const Launcher& launch, const OptionalView& grad_total,
                               const OptionalView& grad_simple, const OptionalView& grad_pruned,
                               const View& targets, const View& logit_lengths,
                               const View& target_lengths, const View& start, const View& sizes,
                               const View& scales, const View& saved, bool work_is_kept,
                               const View& work, const View& gradients, const View& biases) {
  const BandStep step(launch, sizes, scales, targets, logit_lengths, target_lengths, saved, work);
  const StepSizes& s = step.s;
  const WorkLayout& layout = step.layout;
  const GradientLayout out(s);
  const View upstream = out.upstream.part(1).in(gradients);
  dispatch_accumulator(s.acc, "pruned_step_rows_backward", [&](auto zero) {
    using real = decltype(zero);
    launch(upstream_kernel<real>, 1, kSegmentThreads, 0, data_or_null<real>(grad_total),
           data_or_null<real>(grad_simple), data_or_null<real>(grad_pruned), s.reduced != 0 ? 0 : 1,
           static_cast<int32_t>(s.N), static_cast<real>(step.scales.simple),
           static_cast<real>(step.scales.pruned),
           s.reduced == 2 ? real(1) / static_cast<real>(s.N) : real(1),
           mutable_data_of<real>(out.upstream.in(gradients)),
           mutable_data_of<real>(out.zero.in(gradients)));
  });
  const View lse = step.kept.lse.in(saved);
  const View gx = step.kept.gx.in(saved), gy = step.kept.gy.in(saved);
  const View grad_am = out.am.in(gradients), grad_lm = out.lm_sums.in(gradients);
  check(cudaMemsetAsync(grad_am.data_ptr(), 0, out.lm_sums.end() - out.am.offset, launch.stream()),
        "clearing gradients");
  const Matrix grad_weight = matrix_at(biases, 0, s.D);
  const View grad_bias = part_of(biases, s.V * s.D, s.V);
  // From the end, where the forward pass has left the last chunk.
  const int64_t last = (s.rows - 1) / s.chunk_rows * s.chunk_rows;
  for (int64_t begin = last; begin >= 0; begin -= s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, s.rows - begin);
    const bool add = begin < last;
    if (add || !work_is_kept) step.chunk_logits(start, begin, count);
    const View padded = layout.logits.rows_in(work, 0, count);
    const View logits = layout.logits.rows_in(work, 0, count, s.V);
    log_probs_backward(launch, upstream, logits, lse, gx, gy, targets, step.logit_lengths,
                       step.target_lengths, start, step.row_splits, s.T, s.S, begin, s.blank,
                       s.mode, step.scales.fastemit_lambda, step.scales.clamp, padded);
    const View hidden = layout.hidden.rows_in(work, 0, count);
    launch.blas().multiply(grad_weight, matrix_of(padded).t(), matrix_of(hidden), s.padded_V, s.D,
                           count, add);
    column_sums(launch, padded, add, layout.partial_in(work, count), grad_bias);
    hidden_backward(step, start, begin, count, grad_am, grad_lm);
  }
  Segments segments{};
  segments.all[0] = {
      grad_lm.data_ptr(), out.lm.in(gradients).data_ptr(), grad_lm.numel(), grad_lm.numel(), 0.0f,
      s.type != s.acc};
  dispatch_floating(s.type, "pruned_step_rows_backward", [&](auto zero) {
    launch(cast_segments_kernel<decltype(zero)>, dim3(segment_blocks(grad_lm.numel(), 2), 1),
           kSegmentThreads, 0, segments);
  });
}

// The gradients of the trivial joiner, times what reaches each utterance's loss.
void scale_simple(const Launcher& launch, const StepSizes& s, const View units[2],
                  const View& upstream, const View scaled[2]) {
  dispatch_floating(s.type, "pruned_step_layers_backward", [&](auto zero) {
    using scalar = decltype(zero);
    ScaledSides<scalar> sides{};
    for (int i = 0; i < 2; ++i) {
      sides.unit[i] = data_of<scalar>(units[i]);
      sides.gradient[i] = mutable_data_of<scalar>(scaled[i]);
      sides.sizes[i] = (i == 0 ? s.T : s.W) * s.padded_V;
    }
    constexpr int width = 16 / sizeof(scalar);
    const int64_t blocks = segment_blocks(std::max(s.T, s.W) * s.padded_V, width);
    launch(scale_sides_kernel<scalar, width>,
           dim3(static_cast<uint32_t>(std::min<int64_t>(blocks, 64)), 2, s.N), kSegmentThreads, 0,
           sides, data_of<acc_type<scalar>>(upstream));
  });
}

// All layers back to the inputs; nothing is computed for a layer or input that is not wanted.
void pruned_step_layers_backward(const Launcher& launch, const View& encoder, const View& predictor,
                                 const View& sizes, const View& saved, const View& gradients,
                                 int64_t wanted, const View& scratch,
                                 const OptionalView& grad_encoder,
                                 const OptionalView& grad_predictor, const View& weights,
                                 const View& biases) {
  const StepSizes s(sizes);
  const SavedLayout kept(s);
  const GradientLayout given(s);
  const LayerScratchLayout own(s);
  const ParameterLayout parameters(s);
  const View upstream = given.upstream.in(gradients), zero = given.zero.in(gradients);
  const View units[] = {kept.unit_am.in(saved), kept.unit_lm.in(saved)};
  // Where all utterances' losses have one gradient, products take it as their factor.
  const bool is_factor = s.reduced != 0;
  View simple[] = {units[0], units[1]};
  if (!is_factor) {
    simple[0] = own.am.in(scratch);
    simple[1] = own.lm.in(scratch);
    scale_simple(launch, s, units, upstream, simple);
  }
  const View joiner[] = {given.am.in(gradients), given.lm.in(gradients)};
  const View inputs[] = {s.cast_encoder ? kept.encoder.in(saved) : encoder,
                         s.cast_predictor ? kept.predictor.in(saved) : predictor};
  const OptionalView* input_gradients[] = {&grad_encoder, &grad_predictor};
  std::array<ColumnSums, kMostColumnSums> sums{};
  int sum_count = 0;
  for (const int layer : {kAm, kEncoder, kLm, kDecoder}) {
    const int side = layer % 2;
    const bool is_simple = layer == kAm || layer == kLm;
    const int64_t rows = s.rows_of(layer), columns = s.columns_of(layer);
    const int64_t outputs = s.outputs_of(layer), padded = s.padded_outputs_of(layer);
    const View& gradient = is_simple ? simple[side] : joiner[side];
    const Matrix grad = matrix_of(gradient);
    const bool scaled = is_simple && is_factor;
    const auto multiply = [&](const Matrix& out, const Matrix& a, const Matrix& b, int64_t m,
                              int64_t k, bool add) {
      if (scaled) {
        launch.blas().multiply_scaled(upstream, zero, out, a, b, m, columns, k);
      } else {
        launch.blas().multiply(out, a, b, m, columns, k, add);
      }
    };
    if (input_gradients[side]->has_value()) {
      multiply(matrix_of(**input_gradients[side]), grad, matrix_of(kept.weight[layer].in(saved)),
               rows, padded, !is_simple);
    }
    if ((wanted >> layer & 1) == 0) continue;
    multiply(matrix_at(weights, parameters.weight[layer], columns), grad.t(),
             matrix_of(inputs[side]), padded, rows, false);
    const View matrix(grad.data, grad.type, 2, {rows, padded}, {padded, 1});
    sums[sum_count++] = {matrix, own.partial[layer].in(scratch),
                         part_of(biases, parameters.bias[layer], outputs), false,
                         scaled ? OptionalView(upstream) : std::nullopt};
  }
  column_sums_of(launch, sums.data(), sum_count);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("pruned_step_rows_backward", TORCH_BOX(&DeviceOp<&pruned_step_rows_backward>::call));
  m.impl("pruned_step_layers_backward", TORCH_BOX(&DeviceOp<&pruned_step_layers_backward>::call));
}

}  // namespace cuda
}  // namespace pruned_rnnt
