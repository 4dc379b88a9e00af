// pruned_step_forward: encoder and predictor outputs to losses, in one call. Contract:
// pruned_rnnt/ops/native_step.py; the same steps in torch, with the reasons: ops/pruned_step.py.
//
// Axes: N batch, T frames, W = U+1 lattice columns, V vocabulary, D joiner dim, S band, R rows.
#include "cuda/step.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

// The inputs that need it, and all weights and biases, in the type of the products.
void cast_all(const Launcher& launch, const StepSizes& s, const Tensor& encoder,
              const Tensor& predictor, const std::vector<Tensor>& layers, const Tensor& saved,
              const SavedLayout& layout) {
  Segments segments{};
  int count = 0;
  int64_t largest = 0;
  const auto add = [&](const Tensor& source, const Slot& slot, float fill) {
    const int64_t size = slot.row_count() * slot.columns();
    segments.all[count++] = {source.data_ptr(),
                             static_cast<char*>(saved.data_ptr()) + slot.offset,
                             source.numel(),
                             size,
                             fill,
                             source.scalar_type() != s.type};
    largest = std::max(largest, size);
  };
  if (s.cast_encoder) add(encoder, layout.encoder, 0);
  if (s.cast_predictor) add(predictor, layout.predictor, 0);
  for (int layer = 0; layer < kLayers; ++layer) {
    // Columns that padding adds to the trivial joiner have no part in any sum.
    const float fill = layer == kAm || layer == kLm ? minus_infinity<float>() : 0.0f;
    add(layers[2 * layer], layout.weight[layer], 0);
    add(layers[2 * layer + 1], layout.bias[layer], fill);
  }
  dispatch_floating(s.type, "pruned_step_forward", [&](auto zero) {
    launch(cast_segments_kernel<decltype(zero)>, dim3(segment_blocks(largest, 4), count),
           kSegmentThreads, 0, segments);
  });
}

struct Products {
  Tensor encoder, predictor;  // (N T, E), (N W, P) of the type of the products
};

void simple_loss(const Launcher& launch, const Blas& blas, const StepSizes& s,
                 const StepScales& scales, const Batch& batch, const Products& x,
                 const Tensor& saved, const SavedLayout& kept, const Tensor& work,
                 const WorkLayout& layout, const Tensor& total, const Tensor& gx, const Tensor& gy,
                 const Tensor& start) {
  blas.multiply_add_bias(layout.simple_am.matrix_in(work), kept.bias[kAm].in(saved), x.encoder,
                         kept.weight[kAm].transposed_in(saved));
  blas.multiply_add_bias(layout.simple_lm.matrix_in(work), kept.bias[kLm].in(saved), x.predictor,
                         kept.weight[kLm].transposed_in(saved));
  const Tensor am = layout.simple_am.in(work), lm = layout.simple_lm.in(work);
  const Tensor am_max = layout.am_rows.part(0).in(work), am_lse = layout.am_rows.part(1).in(work);
  const Tensor lm_max = layout.lm_rows.part(0).in(work), lm_lse = layout.lm_rows.part(1).in(work);
  const Tensor am_exp = layout.am_high.in(work), lm_exp = layout.lm_high.in(work);
  OptionalTensor am_low, lm_low;
  if (s.split) {
    am_low = layout.am_low.in(work);
    lm_low = layout.lm_low.in(work);
  }
  exp_rows(am, batch.logit_lengths, 0, am_max, am_lse, am_exp, am_low);
  exp_rows(lm, batch.target_lengths, 1, lm_max, lm_lse, lm_exp, lm_low);
  const Tensor product = layout.product.in(work), px = layout.lattice[0].in(work);
  const Tensor py = layout.lattice[1].in(work), logz = layout.lattice[2].in(work);
  simple_product(am_exp, am_low, lm_exp, lm_low, product);
  const OptionalTensor none;
  const OptionalTensor smoothing = scales.lm_only != 0 ? OptionalTensor(lm_lse) : none;
  simple_log_probs(am, lm, am_max, lm_max, product, smoothing, none, none, batch.targets,
                   batch.logit_lengths, batch.target_lengths, s.blank, scales.lm_only, 0.0, px, py,
                   logz);
  band_lattice(px, py, batch.logit_lengths, batch.target_lengths, none, none, s.T, s.W, s.rnnt_type,
               scales.delay_penalty, layout.lattice[3].in(work), layout.lattice[4].in(work), total,
               gx, gy);
  if (s.exact_bounds) {
    prune_bounds_exact(gx, gy, batch.logit_lengths, batch.target_lengths, s.S, s.rnnt_type,
                       layout.scratch.in(work), start);
  } else {
    prune_bounds(gx, gy, batch.logit_lengths, batch.target_lengths, s.S, s.rnnt_type, false, start);
  }
  if (!s.differentiable) return;
  const Tensor ones = layout.ones.in(work);
  dispatch_accumulator(s.acc, "pruned_step_forward", [&](auto zero) {
    using real = decltype(zero);
    launch(fill_kernel<real>, 1, kSegmentThreads, 0, mutable_data_of<real>(ones),
           static_cast<int32_t>(s.N), real(1));
  });
  const Tensor weights = layout.weights.in(work);
  const Tensor am_sum = layout.am_sum.in(work), lm_sum = layout.lm_sum.in(work);
  simple_weights(ones, gx, gy, product, batch.logit_lengths, batch.target_lengths,
                 1 - scales.lm_only, scales.fastemit_lambda, weights);
  const OptionalTensor stack = s.parts == 3 ? OptionalTensor(layout.lm_stack.in(work)) : none;
  simple_sums(weights, am_exp, am_low, lm_exp, lm_low, stack, am_sum, lm_sum);
  // As in simple_products.py: low parts only where the gradient has that many bits.
  const bool low = s.parts == 3;
  simple_backward(ones, gx, gy, am, lm, am_exp, low ? am_low : none, lm_exp, low ? lm_low : none,
                  product, logz, am_sum, lm_sum, smoothing, none, none, batch.targets,
                  batch.logit_lengths, batch.target_lengths, s.blank, scales.lm_only, 0.0,
                  scales.fastemit_lambda, kept.unit_am.in(saved), kept.unit_lm.in(saved));
}

void pruned_step_forward(const Tensor& encoder, const Tensor& predictor, std::vector<Tensor> layers,
                         const Tensor& targets, const Tensor& logit_lengths,
                         const Tensor& target_lengths, const OptionalTensor& row_splits,
                         std::vector<int64_t> size_list, std::vector<double> scale_list,
                         const Tensor& saved, const Tensor& work, const Tensor& gx,
                         const Tensor& gy, const Tensor& start, const Tensor& total,
                         const Tensor& parts) {
  const StepSizes s(size_list);
  const StepScales scales(scale_list);
  const SavedLayout kept(s);
  const WorkLayout layout(s);
  const Batch batch{targets, logit_lengths, target_lengths, row_splits};
  const Launcher launch(saved);
  const Blas blas;

  cast_all(launch, s, encoder, predictor, layers, saved, kept);
  const auto matrix = [](const Tensor& x, int64_t rows, int64_t columns) {
    return torch::stable::view(x, {rows, columns});
  };
  const Products x{
      s.cast_encoder ? kept.encoder.matrix_in(saved) : matrix(encoder, s.N * s.T, s.E),
      s.cast_predictor ? kept.predictor.matrix_in(saved) : matrix(predictor, s.N * s.W, s.P)};
  const Tensor totals = kept.totals.in(saved);
  simple_loss(launch, blas, s, scales, batch, x, saved, kept, work, layout,
              kept.totals.part(0).in(saved), gx, gy, start);

  blas.multiply_add_bias(kept.am.matrix_in(saved), kept.bias[kEncoder].in(saved), x.encoder,
                         kept.weight[kEncoder].transposed_in(saved));
  blas.multiply_add_bias(kept.lm.matrix_in(saved), kept.bias[kDecoder].in(saved), x.predictor,
                         kept.weight[kDecoder].transposed_in(saved));
  const Tensor am = kept.am.in(saved), lm = kept.lm.in(saved);
  const Tensor px = layout.band[0].in(work), py = layout.band[1].in(work);
  const Tensor lse = kept.lse.in(saved);
  for (int64_t begin = 0; begin < s.rows; begin += s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, s.rows - begin);
    chunk_logits(blas, s, batch, start, am, lm, saved, kept, work, layout, begin, count);
    log_probs(layout.logits.rows_in(work, 0, count, s.V), targets, logit_lengths, target_lengths,
              start, row_splits, s.T, s.S, begin, s.blank, s.mode, px, py, lse);
  }
  band_lattice(px, py, logit_lengths, target_lengths, start, row_splits, s.T, s.S, s.rnnt_type,
               scales.delay_penalty, layout.band[2].in(work), layout.band[3].in(work),
               kept.totals.part(1).in(saved), kept.gx.in(saved), kept.gy.in(saved));
  dispatch_accumulator(s.acc, "pruned_step_forward", [&](auto zero) {
    using real = decltype(zero);
    launch(losses_kernel<real>, 1, kSegmentThreads, 0, data_of<real>(totals),
           static_cast<int32_t>(s.N), static_cast<real>(scales.simple),
           static_cast<real>(scales.pruned), s.reduced != 0,
           s.reduced == 2 ? real(1) / static_cast<real>(s.N) : real(1),
           mutable_data_of<real>(total), mutable_data_of<real>(parts));
  });
}

// Bytes of saved, of work (all of it, and without the simple loss), of gradients, and of the
// scratch of both backward passes.
void pruned_step_bytes(std::vector<int64_t> size_list, const Tensor& bytes) {
  const StepSizes s(size_list);
  const WorkLayout work(s);
  const int64_t all[] = {SavedLayout(s).bytes,
                         work.bytes,
                         work.row_bytes,
                         GradientLayout(s).bytes,
                         RowScratchLayout(s).bytes,
                         LayerScratchLayout(s).bytes};
  std::copy(std::begin(all), std::end(all), mutable_data_of<int64_t>(bytes));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("pruned_step_forward", TORCH_BOX(&pruned_step_forward));
}

// Sizes are a question to this library, whatever the device of the answer.
STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) {
  m.impl("pruned_step_bytes", TORCH_BOX(&pruned_step_bytes));
}

}  // namespace cuda
}  // namespace pruned_rnnt
