// pruned_step_forward: encoder and predictor outputs to losses, in one call. Contract:
// pruned_rnnt/ops/step/step_library.py; the same in torch: pruned_rnnt/loss/pruned_transducer.py.
//
// Axes: N batch, T frames, W = U+1 lattice columns, V vocabulary, D joiner dim, S band, R rows.
#include <string>
#include <vector>

#include "cuda/step/step.cuh"
#include "cuda/step/step_contracts.cuh"

namespace pruned_rnnt::cuda {
namespace {

// The lengths of the utterances from `first` on, which are on the CPU if rows are packed, and the
// gradients of their losses, 1 as long as they are not known.
template <typename real>
StepPrologue<real> prologue_of(const PrunedStep& step, const View& frames, const View& symbols,
                               int64_t first, int64_t first_row) {
  const StepSizes& s = step.s;
  StepPrologue<real> result{};
  result.S = s.S;
  HostLengths& lengths = result.lengths;
  lengths.first = static_cast<int32_t>(first);
  lengths.count = static_cast<int32_t>(std::min<int64_t>(kLengthsInLaunch, s.N - first));
  lengths.first_row = first_row;
  if (s.packed) {
    for (int32_t i = 0; i < lengths.count; ++i) {
      lengths.frames[i] = static_cast<int32_t>(number_at(frames, first + i));
      lengths.symbols[i] = static_cast<int32_t>(number_at(symbols, first + i));
    }
    result.device = {mutable_data_of<int32_t>(step.saved.logit_lengths),
                     mutable_data_of<int32_t>(step.saved.target_lengths),
                     mutable_data_of<int64_t>(step.saved.row_splits)};
  }
  if (s.differentiable) {
    const real share = s.share<real>();
    real* const upstream = mutable_data_of<real>(step.saved.upstream);
    result.upstream = {upstream, upstream + s.N,
                       s.grads_in_forward ? share * static_cast<real>(s.simple_scale) : real(1),
                       s.grads_in_forward ? share * static_cast<real>(s.pruned_scale) : real(1)};
  }
  return result;
}

}  // namespace

// Casts the inputs that need it and all weights and biases to the type of the products, writes what
// the device needs of the utterances, and clears the sums for lm.
void PrunedStep::prologue(const View& encoder, const View& predictor,
                          const std::vector<Tensor>& layers, const View& frames,
                          const View& symbols) const {
  Segments segments{};
  int count = 0;
  int64_t largest = 0;
  const auto add = [&](const View& source, const View& target, float fill) {
    segments[count++] = {source.data_ptr(),
                         target.data_ptr(),
                         source.numel(),
                         target.numel(),
                         fill,
                         source.scalar_type() != s.type};
    largest = std::max(largest, target.numel());
  };
  if (s.cast_encoder) add(encoder, saved.input[kEncoderSide], 0);
  if (s.cast_predictor) add(predictor, saved.input[kPredictorSide], 0);
  for (int layer = 0; layer < kLayers; ++layer) {
    // Columns that padding adds to the trivial joiner have no part in any sum.
    const float fill = layer == kAm || layer == kLm ? minus_infinity<float>() : 0.0f;
    const View &weight = saved.weight[layer], &bias = saved.bias[layer];
    const View given[] = {View(layers[2 * layer]), View(layers[2 * layer + 1])};
    const int64_t own = given[1].numel(), rest = s.outputs_of(layer) - own;
    // Padding, but for TDT also the durations, is behind a layer's own rows.
    const bool joined = s.is_tdt() && layer >= kEncoder;
    add(given[0], joined ? rows_of(weight, 0, own) : weight, 0);
    add(given[1], joined ? range_of(bias, 0, own) : bias, fill);
    if (!joined) continue;
    const size_t durations = 2 * (kLayers + layer - kEncoder);
    add(View(layers[durations]), rows_of(weight, own, rest), 0);
    add(View(layers[durations + 1]), range_of(bias, own, rest), 0);
  }
  Cleared cleared{};
  if (s.differentiable) {
    const int64_t bytes = saved.lm_sums.numel() * element_bytes(s.acc);
    cleared = {static_cast<uint4*>(saved.lm_sums.data_ptr()),
               round_up(bytes, sizeof(uint4)) / static_cast<int64_t>(sizeof(uint4))};
  }
  constexpr int64_t kBlockElements = kSegmentThreads * 4;
  const uint32_t blocks = static_cast<uint32_t>(
      std::clamp<int64_t>((largest + kBlockElements - 1) / kBlockElements, 1, 1024));
  dispatch_floating(s.type, "pruned_step_forward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    int64_t row = 0;
    for (int64_t first = 0; first < s.N; first += kLengthsInLaunch) {
      const StepPrologue<real> part = prologue_of<real>(*this, frames, symbols, first, row);
      for (const int32_t length : part.lengths.frames) row += s.S * length;
      if (first > 0) {
        launch(more_utterances_kernel<real>, 1, kSegmentThreads, 0, part);
        continue;
      }
      launch(prologue_kernel<scalar>, dim3(blocks, count + 2), kSegmentThreads, 0, segments, count,
             cleared, part);
    }
  });
}

// x (rows,columns) of the type of the products times the weight of a layer, plus its bias.
void PrunedStep::project(const View& x, Layer layer, const View& out) const {
  const int64_t columns = s.inputs_of(layer), outputs = s.outputs_of(layer);
  launch.blas().multiply_add_bias(
      {out.data_ptr(), out.scalar_type(), row_pitch(out)}, saved.bias[layer], matrix_of(x),
      matrix_of(saved.weight[layer]).t(), x.numel() / columns, outputs, columns);
}

// Hidden rows and logits of a chunk, from row `begin` on.
void PrunedStep::chunk_logits(const View& start, int64_t begin, int64_t count) const {
  const View hidden = rows_of(work.hidden, 0, count);
  joiner_rows(launch, am, lm, band(start), begin, s.activation, hidden);
  launch.blas().multiply_add_bias(matrix_of(work.logits), saved.bias[kOutput], matrix_of(hidden),
                                  matrix_of(saved.weight[kOutput]).t(), count, s.padded_O, s.D);
}

// The simple loss by the recursion over the whole lattice, the bounds, and the gradients of am and
// lm.
void PrunedStep::simple_loss(const View& encoder, const View& predictor, const View& gx,
                             const View& gy, const View& start, const TdtPart& tdt) const {
  const auto& [targets, logit_lengths, target_lengths] = utterances;
  const View &am = work.simple_am, &lm = work.simple_lm;
  project(encoder, kAm, am);
  project(predictor, kLm, lm);
  const View am_max = part_of(work.am_rows, 0), am_lse = part_of(work.am_rows, 1);
  const View lm_max = part_of(work.lm_rows, 0), lm_lse = part_of(work.lm_rows, 1);
  const ExpRows sides[] = {{am, logit_lengths, 0, am_max, am_lse, work.am_exp},
                           {lm, target_lengths, 1, lm_max, lm_lse, work.lm_exp}};
  exp_rows_of(launch, sides, 2);
  simple_product(launch, work.am_exp, work.lm_exp, work.product);
  const bool smooths = s.lm_only_scale != 0;
  const Scales scales{s.blank, s.lm_only_scale, 0.0};
  Smoothing smoothing;
  if (smooths) smoothing.lm_lse = lm_lse;
  simple_log_probs(launch, am, lm, {am_max, lm_max}, work.product, smoothing, utterances, scales,
                   {work.px, work.py, work.logz});
  if (s.is_tdt()) {
    tdt_simple_lattice(gx, gy, tdt);
  } else {
    band_lattice(launch, work.px, work.py, whole(), s.rnnt_type, s.delay_penalty, work.lattice_work,
                 part_of(saved.totals, 0), gx, gy);
  }
  const View &emits = s.is_tdt() ? work.stayed : gx, &blanks = s.is_tdt() ? work.left : gy;
  if (s.exact_bounds) {
    prune_bounds_exact(launch, emits, blanks, logit_lengths, target_lengths, s.S, s.rnnt_type,
                       work.bounds_work, start);
  } else {
    prune_bounds(launch, emits, blanks, logit_lengths, target_lengths, s.S, s.rnnt_type, false,
                 start);
  }
  if (!s.differentiable) return;
  const View upstream = part_of(saved.upstream, 0);
  simple_weights(launch, {upstream, gx, gy}, work.product, logit_lengths, target_lengths,
                 1 - s.lm_only_scale, s.fastemit_lambda, work.weights);
  const View am_gradient = columns_of(saved.outputs[kEncoderSide], 0, s.padded_V);
  const View lm_gradient = columns_of(saved.outputs[kPredictorSide], 0, s.padded_V);
  for (int64_t begin = 0; begin < s.N; begin += s.exp_together) {
    const int64_t count = std::min(s.exp_together, s.N - begin);
    const auto part = [&](const View& x) { return utterances_of(x, begin, count); };
    if (smooths) smoothing.lm_lse = part(lm_lse);
    const View am_sum = part(work.am_sum), lm_sum = utterances_of(work.lm_sum, 0, count);
    simple_sums(launch, part(work.weights), part(work.am_exp), part(work.lm_exp), lm_sum, am_sum);
    simple_backward(launch, {part(upstream), part(gx), part(gy)}, part(am), part(lm),
                    {part(am_max), part(lm_max)},
                    {part(work.product), part(work.logz), am_sum, lm_sum}, smoothing,
                    {part(targets), part(logit_lengths), part(target_lengths)}, scales,
                    s.fastemit_lambda, part(am_gradient), part(lm_gradient));
  }
  if (s.is_tdt()) tdt_simple_gradient(*tdt.gd);
}

// The rows of the band, chunk by chunk, and the recursion over the band.
void PrunedStep::pruned_loss(const View& start, const TdtPart& tdt) const {
  for (int64_t begin = 0; begin < s.rows; begin += s.chunk_rows) {
    const int64_t count = std::min(s.chunk_rows, s.rows - begin);
    chunk_logits(start, begin, count);
    log_probs(launch, rows_of(work.logits, 0, count, s.V), utterances.targets, band(start), begin,
              s.blank, s.mode, {work.band_px, work.band_py, saved.lse});
    if (s.is_tdt()) tdt_chunk_durations(begin, count);
  }
  if (s.is_tdt()) return tdt_band_lattice(start, tdt);
  band_lattice(launch, work.band_px, work.band_py, band(start), s.rnnt_type, s.delay_penalty,
               work.band_work, part_of(saved.totals, 1), saved.gx, saved.gy);
}

namespace {

// What forward writes beside its memory; contracts state the sizes.
struct StepResults {
  using Fields =
      decltype(std::tuple_cat(std::declval<Views<5>>(), std::declval<OptionalViews<4>>()));
  View gx, gy, start, total, parts;
  OptionalView utterance_losses, sums, stay, gd;
};

void pruned_step_forward(const Launcher& launch, const View& encoder, const View& predictor,
                         std::vector<Tensor> layers, const TargetsAndLengths& utterances,
                         const View& fields, std::vector<int64_t> durations,
                         const StepMemory& memory, const StepResults& results) {
  const View &gx = results.gx, &gy = results.gy, &start = results.start;
  const OptionalView& losses = results.utterance_losses;
  const PrunedStep step(launch, fields, utterances, memory);
  const StepSizes& s = step.s;
  step.prologue(encoder, predictor, layers, utterances.logit_lengths, utterances.target_lengths);
  const View& x = step.saved.input_of(kEncoderSide, encoder);
  const View& y = step.saved.input_of(kPredictorSide, predictor);
  step.project(x, kEncoder, step.am);
  step.project(y, kDecoder, step.lm);
  // Writes zeros beside its gradients where there are no frames or symbols.
  const TdtPart tdt{std::move(durations), results.stay, results.gd};
  step.simple_loss(x, y, gx, gy, start, tdt);
  step.pruned_loss(start, tdt);
  dispatch_accumulator(s.acc, "pruned_step_forward", [&](auto zero) {
    using real = decltype(zero);
    launch(losses_kernel<real>, 1, kSegmentThreads, 0, data_of<real>(step.saved.totals),
           static_cast<int32_t>(s.N), static_cast<real>(s.simple_scale),
           static_cast<real>(s.pruned_scale), s.reduction != kNone, s.share<real>(),
           mutable_data_of<real>(results.total), mutable_data_of<real>(results.parts),
           losses.has_value() ? mutable_data_of<real>(*losses) : nullptr);
  });
  if (s.grads_in_forward) step.rows_backward(start, *results.sums);
}

// Chooses the rows of a chunk and writes the other results among the fields.
void pruned_step_layout(const Tensor& memory) {
  StepFields& fields = fields_in(memory);
  fields.chunk_rows = fields.least_chunk_rows;
  fields.chunk_rows = roomy_chunk_rows(StepSizes(fields));
  const StepSizes s(fields);
  fields.saved_bytes = SavedBuffers(s, nullptr).bytes;
  fields.work_bytes = WorkBuffers(s, nullptr).bytes;
  fields.sums_size = s.sum_elements();
}

std::string pruned_step_fields() { return kStepFields; }

}  // namespace

PRUNED_RNNT_CUDA_OP(pruned_step_forward)

// These two compute nothing on a device.
STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CompositeExplicitAutograd, m) {
  m.impl("pruned_step_layout", TORCH_BOX(&pruned_step_layout));
  m.impl("pruned_step_fields", TORCH_BOX(&pruned_step_fields));
}

}  // namespace pruned_rnnt::cuda
