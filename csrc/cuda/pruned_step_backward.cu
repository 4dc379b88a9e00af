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
           mutable_data_of<real>(out.upstream.in(gradients)));
  });
  const View lse = step.kept.lse.in(saved);
  const View gx = step.kept.gx.in(saved), gy = step.kept.gy.in(saved);
  const View grad_am = out.am.in(gradients), grad_lm = out.lm_sums.in(gradients);
  check(cudaMemsetAsync(grad_am.data_ptr(), 0, out.lm_sums.end() - out.am.offset, launch.stream()),
        "clearing gradients");
  const Matrix weight = matrix_of(step.kept.weight[kOutput].in(saved));
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
    // In few pieces, so that it needs little memory of its own.
    const View grad_hidden = layout.grad_hidden.rows_in(work, 0, count);
    for (int64_t first = 0, end; first < count; first = end) {
      end = std::min(count, layout.hidden_rows_after(first));
      launch.blas().multiply(matrix_of(layout.grad_hidden.rows_in(work, first, end - first)),
                             matrix_of(layout.logits.rows_in(work, first, end - first)), weight,
                             end - first, s.D, s.padded_V);
    }
    joiner_rows_backward(launch, grad_hidden, hidden, step.logit_lengths, step.target_lengths,
                         start, step.row_splits, s.T, s.S, begin, s.activation, grad_am, grad_lm);
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
  const Slot simple[] = {own.am, own.lm};
  dispatch_floating(s.type, "pruned_step_layers_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const View units[] = {kept.unit_am.in(saved), kept.unit_lm.in(saved)};
    ScaledSides<scalar> sides{};
    for (int i = 0; i < 2; ++i) {
      sides.unit[i] = data_of<scalar>(units[i]);
      sides.gradient[i] = mutable_data_of<scalar>(simple[i].in(scratch));
      sides.sizes[i] = (i == 0 ? s.T : s.W) * s.padded_V;
    }
    constexpr int width = 16 / sizeof(scalar);
    const int64_t blocks = segment_blocks(std::max(s.T, s.W) * s.padded_V, width);
    launch(scale_sides_kernel<scalar, width>,
           dim3(static_cast<uint32_t>(std::min<int64_t>(blocks, 64)), 2, s.N), kSegmentThreads, 0,
           sides, data_of<acc_type<scalar>>(given.upstream.in(gradients)));
  });
  const View inputs[] = {s.cast_encoder ? kept.encoder.in(saved) : encoder,
                         s.cast_predictor ? kept.predictor.in(saved) : predictor};
  const OptionalView* input_gradients[] = {&grad_encoder, &grad_predictor};
  std::array<ColumnSums, kMostColumnSums> sums{};
  int sum_count = 0;
  for (int side = 0; side < 2; ++side) {
    const int64_t rows = s.rows_of(side), columns = s.columns_of(side);
    const View branches[] = {simple[side].matrix_in(scratch),
                             (side == 0 ? given.am : given.lm).matrix_in(gradients)};
    for (int branch = 0; branch < 2; ++branch) {
      const int layer = side + 2 * branch;
      const int64_t outputs = s.outputs_of(layer), padded = s.padded_outputs_of(layer);
      const Matrix grad = matrix_of(branches[branch]);
      if (input_gradients[side]->has_value()) {
        launch.blas().multiply(matrix_of(**input_gradients[side]), grad,
                               matrix_of(kept.weight[layer].in(saved)), rows, columns, padded,
                               branch == 1);
      }
      if ((wanted >> layer & 1) == 0) continue;
      launch.blas().multiply(matrix_at(weights, parameters.weight[layer], columns), grad.t(),
                             matrix_of(inputs[side]), padded, columns, rows);
      sums[sum_count++] = {branches[branch], own.partial[layer].in(scratch),
                           part_of(biases, parameters.bias[layer], outputs), false};
    }
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
