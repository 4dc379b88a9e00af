// pruned_step_forward: encoder and predictor outputs to losses, in one call. Contract:
// pruned_rnnt/ops/step/step_library.py; the same steps in torch, with the reasons:
// ops/step/pruned_step.py.
//
// Axes: N batch, T frames, W = U+1 lattice columns, V vocabulary, D joiner dim, S band, R rows.
#include <vector>

#include "cuda/step/step.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

int64_t number_at(const View& numbers, int64_t i) {
  const int64_t at = i * numbers.stride(0);
  return numbers.scalar_type() == ScalarType::Long ? data_of<int64_t>(numbers)[at]
                                                   : data_of<int32_t>(numbers)[at];
}

// Lengths (N) of the host from utterance `first` on, and where they belong; and the gradients of
// the losses: of one, where they are not known yet.
template <typename real>
Beginning<real> beginning_of(const BandStep& step, const View& frames, const View& symbols,
                             int64_t first, int64_t first_row) {
  const StepSizes& s = step.s;
  Beginning<real> result{};
  result.S = s.S;
  HostLengths& lengths = result.lengths;
  lengths.first = static_cast<int32_t>(first);
  lengths.count = static_cast<int32_t>(std::min<int64_t>(kLengthsAtOnce, s.N - first));
  lengths.first_row = first_row;
  if (s.packed) {
    for (int32_t i = 0; i < lengths.count; ++i) {
      lengths.frames[i] = static_cast<int32_t>(number_at(frames, first + i));
      lengths.symbols[i] = static_cast<int32_t>(number_at(symbols, first + i));
    }
    result.device = {mutable_data_of<int32_t>(step.logit_lengths),
                     mutable_data_of<int32_t>(step.target_lengths),
                     mutable_data_of<int64_t>(*step.row_splits)};
  }
  if (s.differentiable) {
    const real share = step.share<real>();
    result.upstream = {mutable_data_of<real>(step.kept.upstream.part(0).in(step.saved)),
                       mutable_data_of<real>(step.kept.upstream.part(1).in(step.saved)),
                       s.at_once ? share * static_cast<real>(step.scales.simple) : real(1),
                       s.at_once ? share * static_cast<real>(step.scales.pruned) : real(1)};
  }
  return result;
}

// The inputs that need it, and all weights and biases, in the type of the products; what the device
// has to know of the utterances; and a place for sums cleared.
void begin(const BandStep& step, const View& encoder, const View& predictor,
           const std::vector<Tensor>& layers, const View& frames, const View& symbols) {
  const StepSizes& s = step.s;
  Segments segments{};
  int count = 0;
  int64_t largest = 0;
  const auto add = [&](const View& source, const Slot& slot, float fill) {
    const View target = slot.in(step.saved);
    segments.all[count++] = {source.data_ptr(),
                             target.data_ptr(),
                             source.numel(),
                             target.numel(),
                             fill,
                             source.scalar_type() != s.type};
    largest = std::max(largest, target.numel());
  };
  if (s.cast_encoder) add(encoder, step.kept.input[kEncoderSide], 0);
  if (s.cast_predictor) add(predictor, step.kept.input[kPredictorSide], 0);
  for (int layer = 0; layer < kLayers; ++layer) {
    // Columns that padding adds to the trivial joiner have no part in any sum.
    const float fill = layer == kAm || layer == kLm ? minus_infinity<float>() : 0.0f;
    add(View(layers[2 * layer]), step.kept.weight[layer], 0);
    add(View(layers[2 * layer + 1]), step.kept.bias[layer], fill);
  }
  Cleared cleared{};
  if (s.differentiable) {
    cleared.data = static_cast<uint4*>(step.kept.lm_sums.in(step.saved).data_ptr());
    cleared.words = round_up(step.kept.lm_sums.bytes(), sizeof(uint4)) / sizeof(uint4);
  }
  dispatch_floating(s.type, "pruned_step_forward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    int64_t row = 0;
    for (int64_t first = 0; first < s.N; first += kLengthsAtOnce) {
      const Beginning<real> beginning = beginning_of<real>(step, frames, symbols, first, row);
      for (const int32_t length : beginning.lengths.frames) row += s.S * length;
      if (first > 0) {
        step.launch(begin_kernel<real>, 1, kSegmentThreads, 0, beginning);
        continue;
      }
      step.launch(begin_step_kernel<scalar>, dim3(segment_blocks(largest, 4), count + 2),
                  kSegmentThreads, 0, segments, count, cleared, beginning);
    }
  });
}

// x (rows,columns) of the type of the products times the weight of a layer, plus its bias.
void project(const BandStep& step, const View& x, Layer layer, const View& out) {
  const int64_t columns = step.s.columns_of(layer), outputs = step.s.outputs_of(layer);
  const Matrix result{out.data_ptr(), out.scalar_type(), row_pitch(out)};
  step.launch.blas().multiply_add_bias(result, step.kept.bias[layer].in(step.saved), matrix_of(x),
                                       matrix_of(step.kept.weight[layer].in(step.saved)).t(),
                                       x.numel() / columns, outputs, columns);
}

void simple_loss(const BandStep& step, const View& encoder, const View& predictor, const View& gx,
                 const View& gy, const View& start) {
  const Launcher& launch = step.launch;
  const StepSizes& s = step.s;
  const WorkLayout& layout = step.layout;
  const View &work = step.work, &logit_lengths = step.logit_lengths;
  const View& target_lengths = step.target_lengths;
  const double lm_only = step.scales.lm_only, fastemit_lambda = step.scales.fastemit_lambda;
  const View am = layout.simple_am.in(work), lm = layout.simple_lm.in(work);
  project(step, encoder, kAm, am);
  project(step, predictor, kLm, lm);
  const View am_max = layout.am_rows.part(0).in(work), am_lse = layout.am_rows.part(1).in(work);
  const View lm_max = layout.lm_rows.part(0).in(work), lm_lse = layout.lm_rows.part(1).in(work);
  const View am_exp = layout.am_high.in(work), lm_exp = layout.lm_high.in(work);
  const OptionalView none;
  const OptionalView am_low = s.split ? OptionalView(layout.am_low.in(work)) : none;
  const OptionalView lm_low = s.split ? OptionalView(layout.lm_low.in(work)) : none;
  const ExpRows sides[] = {{am, logit_lengths, 0, am_max, am_lse, am_exp, am_low},
                           {lm, target_lengths, 1, lm_max, lm_lse, lm_exp, lm_low}};
  exp_rows_of(launch, sides, 2);
  const View product = layout.product.in(work), px = layout.lattice[0].in(work);
  const View py = layout.lattice[1].in(work), logz = layout.lattice[2].in(work);
  simple_product(launch, am_exp, am_low, lm_exp, lm_low, product);
  const OptionalView smoothing = lm_only != 0 ? OptionalView(lm_lse) : none;
  simple_log_probs(launch, am, lm, am_max, lm_max, product, smoothing, none, none, step.targets,
                   logit_lengths, target_lengths, s.blank, lm_only, 0.0, px, py, logz);
  band_lattice(launch, px, py, logit_lengths, target_lengths, none, none, s.T, s.W, s.rnnt_type,
               step.scales.delay_penalty, layout.lattice_work.in(work),
               step.kept.totals.part(0).in(step.saved), gx, gy);
  if (s.exact_bounds) {
    prune_bounds_exact(launch, gx, gy, logit_lengths, target_lengths, s.S, s.rnnt_type,
                       layout.scratch.in(work), start);
  } else {
    prune_bounds(launch, gx, gy, logit_lengths, target_lengths, s.S, s.rnnt_type, false, start);
  }
  if (!s.differentiable) return;
  const View upstream = step.kept.upstream.part(0).in(step.saved);
  const View weights = layout.weights.in(work);
  const View am_sum = layout.am_sum.in(work), lm_sum = layout.lm_sum.in(work);
  simple_weights(launch, upstream, gx, gy, product, logit_lengths, target_lengths, 1 - lm_only,
                 fastemit_lambda, weights);
  const OptionalView stack = s.parts == 3 ? OptionalView(layout.lm_stack.in(work)) : none;
  simple_sums(launch, weights, am_exp, am_low, lm_exp, lm_low, stack, am_sum, lm_sum);
  // As in simple_products.py: low parts only where the gradient has that many bits.
  const bool low = s.parts == 3;
  simple_backward(launch, upstream, gx, gy, am, lm, am_exp, low ? am_low : none, lm_exp,
                  low ? lm_low : none, product, logz, am_sum, lm_sum, smoothing, none, none,
                  step.targets, logit_lengths, target_lengths, s.blank, lm_only, 0.0,
                  fastemit_lambda,
                  step.kept.outputs[kEncoderSide].columns_in(step.saved, 0, s.padded_V),
                  step.kept.outputs[kPredictorSide].columns_in(step.saved, 0, s.padded_V));
}

void pruned_loss(const BandStep& step, const View& start) {
  const StepSizes& s = step.s;
  const View &saved = step.saved, &work = step.work;
  const View px = step.layout.band[0].in(work), py = step.layout.band[1].in(work);
  const View lse = step.kept.lse.in(saved);
  for (int64_t begin = 0; begin < s.rows; begin += s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, s.rows - begin);
    step.chunk_logits(start, begin, count);
    log_probs(step.launch, step.layout.logits.rows_in(work, 0, count, s.V), step.targets,
              step.logit_lengths, step.target_lengths, start, step.row_splits, s.T, s.S, begin,
              s.blank, s.mode, px, py, lse);
  }
  band_lattice(step.launch, px, py, step.logit_lengths, step.target_lengths, start, step.row_splits,
               s.T, s.S, s.rnnt_type, step.scales.delay_penalty, step.layout.band_work.in(work),
               step.kept.totals.part(1).in(saved), step.kept.gx.in(saved), step.kept.gy.in(saved));
}

void pruned_step_forward(const Launcher& launch, const View& encoder, const View& predictor,
                         std::vector<Tensor> layers, const View& targets, const View& logit_lengths,
                         const View& target_lengths, const View& sizes, const View& scales,
                         const View& saved, const View& work, const View& gx, const View& gy,
                         const View& start, const View& total, const View& parts,
                         const OptionalView& each, const OptionalView& sums) {
  const BandStep step(launch, sizes, scales, targets, logit_lengths, target_lengths, saved, work);
  const StepSizes& s = step.s;
  begin(step, encoder, predictor, layers, logit_lengths, target_lengths);
  const View x = step.kept.input_of(kEncoderSide, encoder, saved);
  const View y = step.kept.input_of(kPredictorSide, predictor, saved);
  project(step, x, kEncoder, step.am);
  project(step, y, kDecoder, step.lm);
  // Clears what lies beside its gradients where there are no frames or symbols.
  simple_loss(step, x, y, gx, gy, start);
  pruned_loss(step, start);
  dispatch_accumulator(s.acc, "pruned_step_forward", [&](auto zero) {
    using real = decltype(zero);
    launch(losses_kernel<real>, 1, kSegmentThreads, 0, data_of<real>(step.kept.totals.in(saved)),
           static_cast<int32_t>(s.N), static_cast<real>(step.scales.simple),
           static_cast<real>(step.scales.pruned), s.reduced != 0, step.share<real>(),
           mutable_data_of<real>(total), mutable_data_of<real>(parts),
           each.has_value() ? mutable_data_of<real>(*each) : nullptr);
  });
  if (s.at_once) rows_backward(step, start, *sums);
}

// Settles the rows of a chunk and fills in the last of the numbers: bytes of saved and of work,
// elements of sums, and the vocabulary with its padding.
void pruned_step_bytes(const Tensor& numbers) {
  int64_t* const all = mutable_data_of<int64_t>(numbers);
  all[kChunkRows] = roomy_chunk_rows(StepSizes(all));
  const StepSizes s(all);
  const int64_t last[] = {SavedLayout(s).bytes, WorkLayout(s).bytes, SumLayout(s).count,
                          s.padded_V};
  std::copy(std::begin(last), std::end(last), all + numbers.numel() - std::size(last));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("pruned_step_forward", TORCH_BOX(&DeviceOp<&pruned_step_forward>::call));
}

// Sizes are a question to this library, whatever the device of the answer.
STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) {
  m.impl("pruned_step_bytes", TORCH_BOX(&pruned_step_bytes));
}

}  // namespace cuda
}  // namespace pruned_rnnt
