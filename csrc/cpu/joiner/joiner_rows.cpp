// joiner_rows: the joiner's hidden layer act(am[n,t] + lm[n,u]) for a run of lattice nodes, and its
// gradient. Layout: row_geometry.h.
//
// Axes: N utterances, T frames, U symbols, D joiner dimension.
#include "contracts/rows.h"
#include "cpu/common/hidden_row.h"
#include "cpu/common/rows.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

// Derivative of the activation as a function of the activated value.
template <Activation activation, typename real>
PRUNED_RNNT_INLINE real slope(real value) {
  if (activation == Activation::kTanh) return 1 - value * value;
  if (activation == Activation::kRelu) return value > 0 ? real(1) : real(0);
  return 1;
}

template <Activation activation>
struct GradientRow {
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE void run(const scalar* grad_hidden, const scalar* hidden, int64_t D,
                                     real* frame_sum, real* grad_lm) {
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) {
      const real gradient =
          static_cast<real>(grad_hidden[d]) * slope<activation>(static_cast<real>(hidden[d]));
      frame_sum[d] += gradient;
      grad_lm[d] += gradient;
    }
  }
};

void joiner_rows(const View& am, const View& lm, const LatticeRows& lattice, int64_t row_begin,
                 int64_t activation, const View& hidden) {
  const RowGeometry geometry(lattice, lm.size(1) - 1);
  const int64_t rows = hidden.size(0), D = hidden.size(1);
  const int64_t frames = am.size(1), positions = lm.size(1);
  dispatch_floating(am.scalar_type(), "joiner_rows", [&](auto zero) {
    using scalar = decltype(zero);
    const scalar* acoustic = data_of<scalar>(am);
    const scalar* language = data_of<scalar>(lm);
    scalar* output = mutable_data_of<scalar>(hidden);
    dispatch_activation(activation, [&](auto chosen) {
      using Row = HiddenRow<decltype(chosen)::value>;
      for_rows(geometry, row_begin, rows, D, [&](int64_t r, const RowCursor& node) {
        if (!node.valid()) {
          std::fill(output + r * D, output + (r + 1) * D, scalar(0.0f));
          return;
        }
        run_vectorised<Row>(acoustic + (node.n() * frames + node.t()) * D,
                            language + (node.n() * positions + node.u()) * D, D, output + r * D);
      });
    });
  });
}

struct RoundedRow {
  template <typename real, typename out>
  static PRUNED_RNNT_INLINE void run(const real* x, int64_t D, out* target) {
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) target[d] = static_cast<out>(x[d]);
  }
};

template <typename scalar, typename am_scalar>
struct Backward {
  static constexpr int64_t kSlice = 64;

  const RowGeometry& geometry;
  int64_t row_begin, row_end;
  int64_t D, frames, positions;
  const scalar *grad_hidden, *hidden;
  am_scalar* grad_am;
  acc_type<scalar>* grad_lm;

  // Up to kSlice elements of D, from element `from` on, of utterance n.
  template <typename Row>
  void run_slice(int64_t n, int64_t from) const {
    acc_type<scalar> frame_sum[kSlice];
    const int64_t size = std::min(kSlice, D - from);
    const int64_t first = geometry.first_row_of(n), width = geometry.width_of(n);
    const int64_t stored = geometry.stored_frames_of(n), valid = geometry.frames_of(n);
    const int64_t end = std::min(row_end, first + stored * width);
    for (int64_t row = std::max(row_begin, first), frame_end; row < end; row = frame_end) {
      const int64_t t = (row - first) / width, frame_begin = first + t * width;
      const int64_t start = geometry.first_symbol_of(n, t);
      frame_end = std::min(frame_begin + width, end);
      am_scalar* const sums = grad_am + (n * frames + t) * D + from;
      if (frame_end - row == width) {
        std::fill(frame_sum, frame_sum + size, acc_type<scalar>(0));
      } else {
        // A part of a frame, whose other rows are in other chunks.
        std::copy(sums, sums + size, frame_sum);
      }
      for (int64_t i = row; i < frame_end && t < valid; ++i) {
        const int64_t u = start + i - frame_begin, offset = (i - row_begin) * D + from;
        if (u < 0 || u > geometry.target_lengths[n]) continue;
        run_vectorised<Row>(grad_hidden + offset, hidden + offset, size, frame_sum + 0,
                            grad_lm + (n * positions + u) * D + from);
      }
      run_vectorised<RoundedRow>(frame_sum + 0, size, sums);
    }
  }
};

// Assigns the frames of this chunk of rows in grad_am, and adds the chunk's share to grad_lm. A
// task is a slice of D of one utterance and takes its rows in order, so that sums do not depend on
// the number of threads.
void joiner_rows_backward(const View& grad_hidden, const View& hidden, const LatticeRows& lattice,
                          int64_t row_begin, int64_t activation, const View& grad_am,
                          const View& grad_lm) {
  const RowGeometry geometry(lattice, grad_lm.size(1) - 1);
  const int64_t row_end = row_begin + hidden.size(0), D = hidden.size(1);
  if (row_begin == row_end) return;
  const int64_t first_utterance = geometry.utterance_of(row_begin);
  const int64_t utterances = geometry.utterance_of(row_end - 1) + 1 - first_utterance;
  dispatch_floating(hidden.scalar_type(), "joiner_rows_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const auto run = [&](auto am_zero) {
      using am_scalar = decltype(am_zero);
      using Pass = Backward<scalar, am_scalar>;
      const Pass pass{geometry,
                      row_begin,
                      row_end,
                      D,
                      grad_am.size(1),
                      grad_lm.size(1),
                      data_of<scalar>(grad_hidden),
                      data_of<scalar>(hidden),
                      mutable_data_of<am_scalar>(grad_am),
                      mutable_data_of<acc_type<scalar>>(grad_lm)};
      const int64_t slices = (D + Pass::kSlice - 1) / Pass::kSlice;
      dispatch_activation(activation, [&](auto chosen) {
        parallel_tasks(utterances * slices, 1, [&](int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            pass.template run_slice<GradientRow<decltype(chosen)::value>>(
                first_utterance + task / slices, task % slices * Pass::kSlice);
          }
        });
      });
    };
    if (grad_am.scalar_type() == hidden.scalar_type()) {
      run(scalar());
    } else {
      run(acc_type<scalar>());
    }
  });
}

PRUNED_RNNT_CPU_OP(joiner_rows)
PRUNED_RNNT_CPU_OP(joiner_rows_backward)

}  // namespace
}  // namespace pruned_rnnt
