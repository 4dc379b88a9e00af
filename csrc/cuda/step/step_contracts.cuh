// Contracts of the ops of the pruned step, pruned_rnnt/ops/step/step_library.py. Sizes are those of
// the fields; PrunedStep compares `saved` and `work` with its buffers.
#pragma once

#include "arguments.h"
#include "cuda/step/step_layout.cuh"

namespace pruned_rnnt::cuda {

// One of the lengths of utterances, which are on the CPU where rows are packed.
inline int64_t number_at(const View& numbers, int64_t i) {
  const int64_t at = i * numbers.stride(0);
  return numbers.scalar_type() == ScalarType::Long ? data_of<int64_t>(numbers)[at]
                                                   : data_of<int32_t>(numbers)[at];
}

}  // namespace pruned_rnnt::cuda

namespace pruned_rnnt::contracts {

using cuda::StepSizes;

// The next argument, and the dtype of the step.
inline StepSizes step_sizes(Arguments& in) {
  const View& fields = in.unchecked("fields");
  in.require(fields.device().type == aoti_torch_device_type_cpu(), "`fields` must be on the CPU");
  const StepSizes s(cuda::fields_in(fields));
  in.set_scalar(s.type);
  return s;
}

// Those of utterances on the CPU are read here and must have the rows of the step.
inline void check_lengths(Arguments& in, const StepSizes& s, const View& frames,
                          const View& symbols) {
  if (!s.packed) {
    in.check(frames, "logit_lengths", Type::kInt32, {s.N});
    in.check(symbols, "target_lengths", Type::kInt32, {s.N});
    in.require(s.rows == s.N * s.T * s.S, "`fields` must have N T S rows");
    return;
  }
  bool fits = true;
  for (const View* lengths : {&frames, &symbols}) {
    const ScalarType type = lengths->scalar_type();
    fits &= lengths->device().type == aoti_torch_device_type_cpu() && lengths->dim() == 1 &&
            lengths->size(0) == s.N && (type == ScalarType::Int || type == ScalarType::Long);
  }
  in.require(fits,
             "`logit_lengths` and `target_lengths` of packed rows must be (N,) on the CPU, "
             "int32 or int64");
  int64_t rows = 0;
  for (int64_t n = 0; n < s.N; ++n) {
    const int64_t length = cuda::number_at(frames, n);
    fits &= length >= 0 && length <= s.T;
    rows += s.S * length;
  }
  in.require(fits && rows == s.rows, "`logit_lengths` must be 0 .. T, and those of the rows");
}

// weight and bias of a layer of so many inputs; returns its rows.
inline int64_t check_layer(Arguments& in, const std::vector<Tensor>& layers, size_t at,
                           int64_t inputs) {
  Size outputs{"outputs"};
  in.check(View(layers[at]), "layers", Type::kScalarOrFloat, {outputs, inputs});
  in.check(View(layers[at + 1]), "layers", Type::kScalarOrFloat, {outputs});
  return outputs.value();
}

inline void check_layers(Arguments& in, const StepSizes& s, const std::vector<Tensor>& layers) {
  using namespace cuda;
  const int durations = s.is_tdt() ? kLayers - kEncoder : 0;
  in.require(layers.size() == size_t(2 * (kLayers + durations)),
             "`layers` must have a weight and a bias of each layer");
  bool fits = true;
  for (int layer = 0; layer < kLayers; ++layer) {
    int64_t rows = check_layer(in, layers, 2 * layer, s.inputs_of(layer));
    if (s.is_tdt() && layer >= kEncoder) {
      rows += check_layer(in, layers, 2 * (kLayers + layer - kEncoder), s.inputs_of(layer));
    }
    fits &= rows <= s.outputs_of(layer);
  }
  in.require(fits, "`layers` must have at most the outputs of `fields`");
}

// The type of an input: that of the step, or the one that it is cast from.
inline void check_input(Arguments& in, const StepSizes& s, const View& x, const char* name,
                        int side, bool is_cast) {
  in.check(x, name, is_cast ? Type::kScalarOrFloat : Type::kScalar,
           {s.N, s.length_of(side), s.inputs_of(side)});
}

inline void pruned_step_forward(Arguments& in) {
  using namespace cuda;
  const View &encoder = in.unchecked("encoder"), &predictor = in.unchecked("predictor");
  const std::vector<Tensor>& layers = *in.tensors("layers");
  const View& targets = in.unchecked("targets");
  const View &frames = in.unchecked("logit_lengths"), &symbols = in.unchecked("target_lengths");
  const StepSizes s = step_sizes(in);
  Size U{"U"}, saved_bytes{"bytes", kMostInt64}, work_bytes{"bytes", kMostInt64};
  check_input(in, s, encoder, "encoder", kEncoderSide, s.cast_encoder);
  check_input(in, s, predictor, "predictor", kPredictorSide, s.cast_predictor);
  check_layers(in, s, layers);
  in.check(targets, "targets", Type::kInt32, {s.N, U});
  check_lengths(in, s, frames, symbols);
  const std::vector<int64_t>& durations = in.numbers("durations");
  bool fits = static_cast<int64_t>(durations.size()) == s.K;
  for (const int64_t duration : durations) fits &= duration >= 0 && duration <= s.longest;
  in.require(fits, "`durations` must be those of `fields`");
  in.tensor("saved", Type::kBytes, {saved_bytes});
  in.tensor("work", Type::kBytes, {work_bytes});
  in.tensor("gx", Type::kReal, {s.N, s.T, s.W});
  in.tensor("gy", Type::kReal, {s.N, s.T, s.W});
  in.tensor("start", Type::kInt32, {s.N, s.T});
  const int64_t losses = s.reduction == kNone ? s.N : 1;
  in.flat("total", Type::kReal, losses);
  in.flat("parts", Type::kReal, 2 * losses);
  const bool has_losses = in.optional("utterance_losses", Type::kReal, {3, s.N}) != nullptr;
  const bool has_sums = in.optional("sums", Type::kReal, {s.sum_elements()}) != nullptr;
  const bool has_stay = in.optional("stay", Type::kReal, {s.N, s.T, s.W}) != nullptr;
  const bool has_gd = in.optional("gd", Type::kReal, {s.N, s.T, s.W, s.K}) != nullptr;
  in.require(has_losses || s.reduction == kNone, "reduced losses need `utterance_losses`");
  in.require(has_sums || !s.grads_in_forward, "gradients need `sums`");
  in.require((has_stay && has_gd) || !s.is_tdt(), "durations need `stay` and `gd`");
}

inline void pruned_step_rows_backward(Arguments& in) {
  using namespace cuda;
  const View* upstream[] = {in.unchecked_optional("grad_total"),
                            in.unchecked_optional("grad_simple"),
                            in.unchecked_optional("grad_pruned")};
  const View& targets = in.unchecked("targets");
  const View &frames = in.unchecked("logit_lengths"), &symbols = in.unchecked("target_lengths");
  const View& start = in.unchecked("start");
  const StepSizes s = step_sizes(in);
  Size U{"U"}, saved_bytes{"bytes", kMostInt64}, work_bytes{"bytes", kMostInt64};
  for (const View* gradient : upstream) {
    if (gradient == nullptr) continue;
    in.check_flat(*gradient, "gradients of the losses", Type::kReal,
                  s.reduction == kNone ? s.N : 1);
  }
  in.require(s.differentiable, "`fields` must be those of a step with gradients");
  in.check(targets, "targets", Type::kInt32, {s.N, U});
  check_lengths(in, s, frames, symbols);
  in.check(start, "start", Type::kInt32, {s.N, s.T});
  in.tensor("saved", Type::kBytes, {saved_bytes});
  in.tensor("work", Type::kBytes, {work_bytes});
  in.tensor("sums", Type::kReal, {s.sum_elements()});
}

inline void pruned_step_layers_backward(Arguments& in) {
  using namespace cuda;
  const View &encoder = in.unchecked("encoder"), &predictor = in.unchecked("predictor");
  const StepSizes s = step_sizes(in);
  Size saved_bytes{"bytes", kMostInt64};
  check_input(in, s, encoder, "encoder", kEncoderSide, s.cast_encoder);
  check_input(in, s, predictor, "predictor", kPredictorSide, s.cast_predictor);
  in.require(s.differentiable, "`fields` must be those of a step with gradients");
  in.tensor("saved", Type::kBytes, {saved_bytes});
  in.optional("grad_encoder", Type::kScalarOrFloat, {s.N, s.T, s.E});
  in.optional("grad_predictor", Type::kScalarOrFloat, {s.N, s.W, s.P});
  in.optional("encoder_weights", Type::kScalarOrFloat, {s.side_outputs(), s.E});
  in.optional("predictor_weights", Type::kScalarOrFloat, {s.side_outputs(), s.P});
  in.tensor("sums", Type::kReal, {s.sum_elements()});
}

}  // namespace pruned_rnnt::contracts
