// joiner_rows: the joiner's hidden layer act(am[n,t] + lm[n,u]) for a run of lattice nodes, and its
// gradient. Layout: cpu/geometry.h.
//
// Axes: N utterances, T frames, U symbols, D joiner dimension.
#include "cpu/fresh_memory.h"
#include "cpu/geometry.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace pruned_rnnt {
namespace {

enum class Activation : int64_t { kNone = 0, kTanh = 1, kRelu = 2 };

template <Activation activation, typename real>
PRUNED_RNNT_INLINE real activate(real x) {
  if (activation == Activation::kTanh) return tanh_of(x);
  // The comparison this way round keeps NaN.
  if (activation == Activation::kRelu) return x < 0 ? real(0) : x;
  return x;
}

// The derivative of the activation, from its value.
template <Activation activation, typename real>
PRUNED_RNNT_INLINE real slope(real value) {
  if (activation == Activation::kTanh) return 1 - value * value;
  if (activation == Activation::kRelu) return value > 0 ? real(1) : real(0);
  return 1;
}

template <Activation activation>
struct HiddenRow {
  template <typename scalar>
  static PRUNED_RNNT_INLINE void run(const scalar* am, const scalar* lm, int64_t D,
                                     scalar* hidden) {
    using real = acc_type<scalar>;
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const real sum = static_cast<real>(am[d]) + static_cast<real>(lm[d]);
      hidden[d] = static_cast<scalar>(activate<activation>(sum));
    }
  }
};

template <Activation activation>
struct GradientRow {
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE void run(const scalar* grad_hidden, const scalar* hidden, int64_t D,
                                     real* grad_am, real* grad_lm) {
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const real gradient =
          static_cast<real>(grad_hidden[d]) * slope<activation>(static_cast<real>(hidden[d]));
      grad_am[d] += gradient;
      grad_lm[d] += gradient;
    }
  }
};

template <typename Work>
void dispatch_activation(int64_t activation, Work&& work) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kNone:
      return work(std::integral_constant<Activation, Activation::kNone>());
    case Activation::kTanh:
      return work(std::integral_constant<Activation, Activation::kTanh>());
    case Activation::kRelu:
      return work(std::integral_constant<Activation, Activation::kRelu>());
    default:
      STD_TORCH_CHECK(false, "activation has no function of number ", activation);
  }
}

void joiner_rows(const Tensor& am, const Tensor& lm, const Tensor& logit_lengths,
                 const Tensor& target_lengths, const OptionalTensor& start,
                 const OptionalTensor& row_splits, int64_t T, int64_t S, int64_t row_begin,
                 int64_t activation, const Tensor& hidden) {
  const Geometry geometry(logit_lengths, target_lengths, start, row_splits, T, S, lm.size(1) - 1);
  const int64_t rows = hidden.size(0), D = hidden.size(1);
  const int64_t frames = am.size(1), positions = lm.size(1);
  dispatch_floating(am.scalar_type(), "joiner_rows", [&](auto zero) {
    using scalar = decltype(zero);
    const scalar* acoustic = data_of<scalar>(am);
    const scalar* language = data_of<scalar>(lm);
    scalar* output = mutable_data_of<scalar>(hidden);
    dispatch_activation(activation, [&](auto chosen) {
      using Row = HiddenRow<decltype(chosen)::value>;
      parallel_tasks(rows, rows_per_task(D), [&](int64_t begin, int64_t end) {
        NodeCursor node(geometry, row_begin + begin);
        for (int64_t r = begin; r < end; ++r, node.advance()) {
          if (!node.valid()) {
            std::fill(output + r * D, output + (r + 1) * D, scalar(0.0f));
            continue;
          }
          run_vectorised<Row>(acoustic + (node.n() * frames + node.t()) * D,
                              language + (node.n() * positions + node.u()) * D, D, output + r * D);
        }
      });
    });
  });
}

// grad_am: the frames of this run of rows are assigned. grad_lm: this run's share is added. A task
// is a slice of D of one utterance: it goes through the rows in order, so that sums do not depend
// on the threads.
void joiner_rows_backward(const Tensor& grad_hidden, const Tensor& hidden,
                          const Tensor& logit_lengths, const Tensor& target_lengths,
                          const OptionalTensor& start, const OptionalTensor& row_splits, int64_t T,
                          int64_t S, int64_t row_begin, int64_t activation, const Tensor& grad_am,
                          const Tensor& grad_lm) {
  const Geometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                          grad_lm.size(1) - 1);
  const int64_t rows = hidden.size(0), D = hidden.size(1);
  const int64_t frames = grad_am.size(1), positions = grad_lm.size(1);
  if (rows == 0) return;
  constexpr int64_t slice = 64;
  const int64_t slices = (D + slice - 1) / slice;
  const int64_t first_utterance = NodeCursor(geometry, row_begin).n();
  const int64_t utterances = NodeCursor(geometry, row_begin + rows - 1).n() + 1 - first_utterance;
  dispatch_floating(hidden.scalar_type(), "joiner_rows_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* upstream = data_of<scalar>(grad_hidden);
    const scalar* value = data_of<scalar>(hidden);
    real* acoustic = mutable_data_of<real>(grad_am);
    real* language = mutable_data_of<real>(grad_lm);
    dispatch_activation(activation, [&](auto chosen) {
      using Row = GradientRow<decltype(chosen)::value>;
      parallel_tasks(utterances * slices, 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t n = first_utterance + task / slices;
          const int64_t from = task % slices * slice, size = std::min(slice, D - from);
          const int64_t row_end = std::min(row_begin + rows, geometry.end_row_of(n));
          int64_t row = std::max(row_begin, geometry.first_row_of(n));
          NodeCursor node(geometry, row);
          real* frame_sum = nullptr;
          for (; row < row_end; ++row, node.advance()) {
            real* frame = acoustic + (n * frames + node.t()) * D + from;
            if (frame != frame_sum) std::fill(frame, frame + size, real(0));
            frame_sum = frame;
            if (!node.valid()) continue;
            const int64_t offset = (row - row_begin) * D + from;
            run_vectorised<Row>(upstream + offset, value + offset, size, frame_sum,
                                language + (n * positions + node.u()) * D + from);
          }
        }
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) {
  m.impl("joiner_rows", TORCH_BOX(&joiner_rows));
  m.impl("joiner_rows_backward", TORCH_BOX(&joiner_rows_backward));
}

}  // namespace pruned_rnnt
