// The numbers that a pruned step is told.
//
// Axes as in pruned_rnnt/ops/step/pruned_step.py; W = U+1 columns of the lattice.
#pragma once

#include <array>

#include "cuda/common/view.cuh"

namespace pruned_rnnt {
namespace cuda {

inline int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

enum Layer { kAm, kLm, kEncoder, kDecoder, kOutput, kLayers };
// What the first four layers read: a layer's number modulo 2.
enum Side { kEncoderSide, kPredictorSide, kSides };

constexpr int kChunkRows = 9;

// The integers of a step: int64 on the CPU, in the order of StepSizes in
// pruned_rnnt/ops/step/step_library.py.
struct StepSizes {
  explicit StepSizes(const View& numbers) : StepSizes(data_of<int64_t>(numbers)) {}
  explicit StepSizes(const int64_t* x)
      : N(x[0]),
        T(x[1]),
        W(x[2]),
        E(x[3]),
        P(x[4]),
        D(x[5]),
        V(x[6]),
        S(x[7]),
        rows(x[8]),
        chunk_rows(x[kChunkRows]),
        hidden_rows(x[10]),
        blank(x[11]),
        rnnt_type(x[12]),
        mode(x[13]),
        activation(x[14]),
        exact_bounds(x[15] != 0),
        differentiable(x[16] != 0),
        reduced(x[17]),
        split(x[18] != 0),
        cast_encoder(x[19] != 0),
        cast_predictor(x[20] != 0),
        packed(x[22] != 0),
        at_once(x[23] != 0) {
    static constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Double, ScalarType::Half,
                                            ScalarType::BFloat16};
    type = kTypes[x[21]];
    acc = type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    padded_V = round_up(V, 16 / element_bytes(type));
    // simple_products.py
    stored = split ? ScalarType::BFloat16 : acc;
    summed = split && type != ScalarType::Float ? ScalarType::BFloat16 : acc;
    parts = split && type == ScalarType::Float ? 3 : 1;
    stored_V = round_up(padded_V, split ? 8 : 1);
    stored_W = round_up(W, split ? 8 : 1);
  }

  int64_t columns_of(int layer) const { return std::array<int64_t, 5>{E, P, E, P, D}[layer]; }
  // Rows of a layer's weight, with padding.
  int64_t outputs_of(int layer) const {
    return std::array<int64_t, 5>{padded_V, padded_V, D, D, padded_V}[layer];
  }
  // Rows of the encoder's output or the predictor's, of an utterance and of all.
  int64_t length_of(int side) const { return side == kEncoderSide ? T : W; }
  int64_t rows_of(int side) const { return N * length_of(side); }
  // Outputs of the two layers that read it.
  int64_t side_outputs() const { return padded_V + D; }

  int64_t N, T, W, E, P, D, V, S, rows, chunk_rows, hidden_rows, blank, rnnt_type, mode, activation;
  bool exact_bounds, differentiable;
  int64_t reduced;  // 0 none, 1 sum, 2 mean
  bool split, cast_encoder, cast_predictor;
  bool packed;   // the host knows the lengths, and rows are packed
  bool at_once;  // gradients for a gradient of 1 of the reduced loss, with the losses
  ScalarType type, acc, stored, summed;
  int64_t padded_V, stored_V, stored_W, parts;
};

// The floating-point options: float64 on the CPU, in the order of StepScales in step_library.py.
struct StepScales {
  explicit StepScales(const View& numbers) : StepScales(data_of<double>(numbers)) {}
  explicit StepScales(const double* x)
      : lm_only(x[0]),
        delay_penalty(x[1]),
        fastemit_lambda(x[2]),
        clamp(x[3]),
        simple(x[4]),
        pruned(x[5]) {}

  double lm_only, delay_penalty, fastemit_lambda, clamp, simple, pruned;
};

}  // namespace cuda
}  // namespace pruned_rnnt
