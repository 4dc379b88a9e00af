// The gradient of the loss by the logits of a row. Formulas: pruned_rnnt/ops/joiner/log_probs.py.
//
// Axes: R rows, V vocabulary.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/packed_pair.cuh"
#include "cuda/joiner/logit_rows.cuh"
#include "row_geometry.h"
#include "symbol_table.h"
#include "view.h"

namespace pruned_rnnt::cuda {

template <typename real>
struct GradientInputs {
  GradientInputs(const View& grad_loss, const RowStatistics& statistics,
                 const GradientOptions& options)
      : grad_loss(data_of<real>(grad_loss)),
        lse(data_of<real>(statistics.lse)),
        emit_occupancy(data_of<real>(statistics.gx)),
        blank_occupancy(data_of<real>(statistics.gy)),
        emit_factor(static_cast<real>(1 + options.fastemit_lambda)),
        clamp(static_cast<real>(options.clamp)),
        mode(static_cast<LogitMode>(options.mode)) {}

  const real *grad_loss, *lse, *emit_occupancy, *blank_occupancy;
  real emit_factor, clamp;
  LogitMode mode;
};

// The gradient of one row: unit(v) of the formulas, clamped, times the upstream gradient of the
// utterance.
template <typename real>
struct RowGradient {
  real lse, emit, stay, weight, upstream, clamp;
  int32_t blank, target;
  bool used, is_hat;

  RNNT_DEVICE RowGradient(const GradientInputs<real>& in, int64_t row, const RowCursor& node,
                          const SymbolTable& symbols)
      : emit(in.emit_factor * in.emit_occupancy[row]),
        stay(in.blank_occupancy[row]),
        clamp(in.clamp),
        blank(symbols.blank),
        is_hat(in.mode == LogitMode::kHat) {
    used = node.valid() && emit + stay != 0;
    if (!used) return;
    lse = in.lse[row];
    upstream = in.grad_loss[node.n()];
    target = symbols.emitted_from(node);
    weight = is_hat ? emit : (in.mode == LogitMode::kLogProbs ? real(0) : emit + stay);
  }

  // The row that another lane has prepared.
  RNNT_DEVICE RowGradient from_lane(int lane) const {
    RowGradient row = *this;
    const auto take = [lane](auto& x) { x = __shfl_sync(kAllLanes, x, lane); };
    take(row.lse);
    take(row.emit);
    take(row.stay);
    take(row.weight);
    take(row.upstream);
    take(row.target);
    row.used = __shfl_sync(kAllLanes, int(used), lane) != 0;
    return row;
  }

  // Whether most elements of the gradient are a factor times their probability.
  RNNT_DEVICE bool plain() const { return clamp <= 0 && weight != 0; }

  RNNT_DEVICE real finish(real unit) const {
    if (clamp > 0) unit = unit > clamp ? clamp : (unit < -clamp ? -clamp : unit);
    return unit * upstream;
  }
  RNNT_DEVICE real softmax_part(real logit) const {
    return weight == 0 ? real(0) : weight * exp_of(logit - lse);
  }
  RNNT_DEVICE real at_target(real logit) const { return finish(softmax_part(logit) - emit); }
  RNNT_DEVICE real at_blank(real logit) const {
    if (is_hat) return finish(emit * sigmoid(logit) - stay * sigmoid(-logit));
    return finish(softmax_part(logit) - stay);
  }
};

// The elements of a row's gradient at the target and at the blank, which differ from the others:
// computed from a vector of the row's logits that contains the element at_target(logits, at) or
// at_blank(logits, at).
template <typename real>
struct ExceptionsInVector {
  template <int width>
  RNNT_DEVICE real at_target(const real (&logits)[width], uint32_t at) const {
    return row.at_target(select(logits, at));
  }
  template <int width>
  RNNT_DEVICE real at_blank(const real (&logits)[width], uint32_t at) const {
    return row.at_blank(select(logits, at));
  }
  template <int width>
  static RNNT_DEVICE real select(const real (&x)[width], uint32_t at) {
    real selected = 0;
#pragma unroll
    for (int i = 0; i < width; ++i) selected = at == i ? x[i] : selected;
    return selected;
  }

  const RowGradient<real>& row;
};

// The same, computed before.
template <typename real>
struct KnownExceptions {
  // Those that another lane has prepared.
  RNNT_DEVICE KnownExceptions from_lane(int lane) const {
    return {__shfl_sync(kAllLanes, target, lane), __shfl_sync(kAllLanes, blank, lane)};
  }
  template <int width>
  RNNT_DEVICE real at_target(const real (&)[width], uint32_t) const {
    return target;
  }
  template <int width>
  RNNT_DEVICE real at_blank(const real (&)[width], uint32_t) const {
    return blank;
  }

  real target, blank;
};

// The gradient of `width` logits from v on; 0 from V on.
template <bool plain, int width, typename scalar, typename Exceptions>
RNNT_DEVICE Vector<scalar, width> gradient_of(const RowGradient<acc_type<scalar>>& row,
                                              const Vector<scalar, width>& logits, int32_t v,
                                              int32_t V, const Exceptions& exceptions) {
  using real = acc_type<scalar>;
  const real factor = row.weight * row.upstream;
  real x[width], gradient[width];
  unpack(logits, x);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    gradient[i] = plain ? factor * exp_of(x[i] - row.lse) : row.finish(row.softmax_part(x[i]));
  }
  const auto replace = [&](uint32_t at, real value) {
#pragma unroll
    for (int i = 0; i < width; ++i) gradient[i] = at == i ? value : gradient[i];
  };
  // Few lanes have one of these elements: each of them is a branch that most warps do not take.
  const uint32_t target_at = uint32_t(row.target - v), blank_at = uint32_t(row.blank - v);
  if (target_at < width) replace(target_at, exceptions.at_target(x, target_at));
  if (blank_at < width) replace(blank_at, exceptions.at_blank(x, blank_at));
  if (v + width > V) {
#pragma unroll
    for (int i = 0; i < width; ++i) gradient[i] = v + i < V ? gradient[i] : real(0);
  }
  return pack<scalar>(gradient);
}

// `columns` elements of a gradient row by the lanes of a group; those from V on are 0.
template <bool plain, int lanes, int width, typename scalar>
RNNT_DEVICE void write_gradient(const RowGradient<acc_type<scalar>>& row, const scalar* logits,
                                int32_t V, int32_t columns, int lane, scalar* gradient) {
  constexpr int in_flight = kInFlight<width>;
  for (int32_t begin = lane * width; begin < columns; begin += lanes * width * in_flight) {
    Vector<scalar, width> loaded[in_flight];
    load_vectors<lanes>(logits, begin, V, loaded);
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const int32_t v = begin + k * lanes * width;
      if (v >= columns) break;
      const ExceptionsInVector<acc_type<scalar>> exceptions{row};
      store_vector<width>(gradient + v, gradient_of<plain>(row, loaded[k], v, V, exceptions));
    }
  }
}

}  // namespace pruned_rnnt::cuda
