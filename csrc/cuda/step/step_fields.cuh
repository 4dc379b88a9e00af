// The numbers that a pruned step needs beside its tensors: one table, from which StepFields is made
// and which the op pruned_step_fields returns, so that pruned_rnnt/ops/step/step_library.py fills
// in the fields by name.
//
// Axes as in pruned_rnnt/ops/step/step_library.py.
#pragma once

#include "stable.h"

// clang-format off
// integer(name) takes 0 or 1 for flags; choice(name, values) the position of one of the values;
// result(name) is an integer that pruned_step_layout writes.
#define PRUNED_RNNT_TYPES "float32,float64,float16,bfloat16"
#define PRUNED_RNNT_STEP_FIELDS(integer, choice, real, result)                                  \
  integer(N) integer(T) integer(W) integer(E) integer(P) integer(D) integer(V) integer(S)       \
  integer(padded_V)                        /* V', rows of the am and lm weights */              \
  integer(K) integer(padded_K)             /* durations of TDT, 0 without */                    \
  integer(padded_O)                        /* rows of the output weight: V, then K */           \
  integer(longest)                         /* duration */                                       \
  integer(rows)                            /* R, rows of the band */                            \
  integer(least_chunk_rows)                /* rows of a chunk, unless there is room for more */ \
  integer(hidden_rows)                     /* rows whose hidden gradient is in memory */        \
  integer(blank) integer(rnnt_type) integer(mode) integer(activation)                           \
  integer(exact_bounds)                                                                         \
  integer(differentiable)                  /* a backward pass may follow */                     \
  integer(grads_in_forward)                /* gradients for a gradient of 1, with the losses */ \
  integer(packed)                          /* lengths are on the CPU, and rows are packed */    \
  integer(cast_encoder) integer(cast_predictor)                                                 \
  choice(reduction, "none,sum,mean")                                                            \
  choice(dtype, PRUNED_RNNT_TYPES)         /* of the products */                               \
  choice(exp_dtype, PRUNED_RNNT_TYPES)     /* this and the next: ExpLayout in Python */         \
  integer(am_parts) integer(lm_parts) integer(exp_multiple)                                     \
  integer(exp_together)                    /* utterances of one call of simple_sums */          \
  real(lm_only_scale) real(delay_penalty) real(fastemit_lambda) real(clamp) real(sigma)         \
  real(simple_scale) real(pruned_scale)                                                         \
  result(chunk_rows)                                                                            \
  result(saved_bytes) result(work_bytes)   /* sizes of the two pieces of memory */              \
  result(sums_size)                        /* elements of sums */
// clang-format on

namespace pruned_rnnt::cuda {

// The fields as they are in the caller's memory: 8 bytes each.
#define PRUNED_RNNT_INTEGER(name, ...) int64_t name;
#define PRUNED_RNNT_REAL(name) double name;
struct StepFields {
  PRUNED_RNNT_STEP_FIELDS(PRUNED_RNNT_INTEGER, PRUNED_RNNT_INTEGER, PRUNED_RNNT_REAL,
                          PRUNED_RNNT_INTEGER)
};
#undef PRUNED_RNNT_INTEGER
#undef PRUNED_RNNT_REAL

// "name:type" of each field in that order; type is a letter of Python's struct module, or the
// values of a choice.
#define PRUNED_RNNT_INTEGER(name) #name ":q "
#define PRUNED_RNNT_CHOICE(name, values) #name ":" values " "
#define PRUNED_RNNT_REAL(name) #name ":d "
constexpr char kStepFields[] = PRUNED_RNNT_STEP_FIELDS(PRUNED_RNNT_INTEGER, PRUNED_RNNT_CHOICE,
                                                       PRUNED_RNNT_REAL, PRUNED_RNNT_INTEGER);
#undef PRUNED_RNNT_INTEGER
#undef PRUNED_RNNT_CHOICE
#undef PRUNED_RNNT_REAL

inline int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

enum Layer { kAm, kLm, kEncoder, kDecoder, kOutput, kLayers };
// The inputs of the first four layers: a layer's number modulo 2.
enum Side { kEncoderSide, kPredictorSide, kSides };
enum Reduction { kNone, kSum, kMean };

// The fields and what follows from them.
struct StepSizes : StepFields {
  explicit StepSizes(const StepFields& fields) : StepFields(fields) {
    static constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Double, ScalarType::Half,
                                            ScalarType::BFloat16};
    type = kTypes[dtype];
    exp_type = kTypes[exp_dtype];
    acc = type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    exp_V = round_up(padded_V, exp_multiple);
    exp_W = round_up(W, exp_multiple);
  }

  int64_t inputs_of(int layer) const {
    return layer == kOutput ? D : layer % kSides == kEncoderSide ? E : P;
  }
  // Rows of a layer's weight, with padding and with durations behind its own.
  int64_t outputs_of(int layer) const {
    return layer == kOutput ? padded_O : layer >= kEncoder ? D + padded_K : padded_V;
  }
  // Rows of a side's input, of an utterance and of all.
  int64_t length_of(int side) const { return side == kEncoderSide ? T : W; }
  int64_t rows_of(int side) const { return N * length_of(side); }
  // Outputs of a side's layers.
  int64_t side_outputs() const { return padded_V + D + padded_K; }
  bool is_tdt() const { return K > 0; }
  // Elements of SumBuffers.
  int64_t sum_elements() const { return padded_O * (D + 1) + kSides * side_outputs(); }
  // The weight of an utterance's losses in the reduced ones.
  template <typename real>
  real share() const {
    return reduction == kMean ? real(1) / static_cast<real>(N) : real(1);
  }

  ScalarType type, acc, exp_type;
  int64_t exp_V, exp_W;
};

// The fields in the caller's memory: int64 on the CPU.
template <typename Array>
StepFields& fields_in(const Array& memory) {
  STD_TORCH_CHECK(memory.scalar_type() == ScalarType::Long && memory.dim() == 1 &&
                      memory.stride(0) == 1 &&
                      memory.numel() * sizeof(int64_t) == sizeof(StepFields),
                  "pruned_rnnt: the fields of a pruned step are not those of the compiled library");
  auto& fields = *static_cast<StepFields*>(memory.data_ptr());
  constexpr int64_t kMostTypes = 4;
  bool fits = true;
  for (const int64_t choice : {fields.dtype, fields.exp_dtype}) {
    fits &= choice >= 0 && choice < kMostTypes;
  }
  for (const int64_t size :
       {fields.N, fields.T, fields.W, fields.E, fields.P, fields.D, fields.V, fields.S,
        fields.padded_V, fields.K, fields.padded_K, fields.padded_O, fields.longest}) {
    fits &= size >= 0 && size <= std::numeric_limits<int32_t>::max();
  }
  fits &=
      fields.V <= fields.padded_V && fields.K <= fields.padded_K &&
      fields.V + fields.K <= fields.padded_O && fields.blank >= 0 && fields.blank < fields.V &&
      fields.S > 0 && fields.W > 0 && fields.rows >= 0 && fields.hidden_rows >= 0 &&
      (fields.rows == 0 || fields.least_chunk_rows > 0) && fields.exp_multiple > 0 &&
      fields.exp_together > 0 &&
      (fields.am_parts == 1 ? fields.lm_parts == 1 : fields.am_parts == 2 && fields.lm_parts == 3);
  STD_TORCH_CHECK(fits, "pruned_rnnt: the fields of a pruned step are no sizes of one");
  return fields;
}

}  // namespace pruned_rnnt::cuda
