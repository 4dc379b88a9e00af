// log_probs_backward: the gradient of the loss by the logits, read once and written once, in place
// where the caller gives the same memory. Formulas: pruned_rnnt/ops/log_probs.py.
//
// Axes: R rows, V vocabulary.
#include "cuda/arithmetic.cuh"
#include "cuda/logit_rows.cuh"
#include "cuda/row_cursor.cuh"
#include "cuda/symbol_table.cuh"
#include "cuda/vector_access.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

// Vectors a lane has in flight at a time.
template <int width>
constexpr int kInFlight = width >= 8 ? 2 : 4;

// What the gradient of one row is made of: unit(v) of the formulas, clamped, times the incoming
// gradient of the utterance.
template <typename real>
struct RowGradient {
  real lse, emit, stay, weight, upstream, clamp;
  int32_t blank, target;
  LogitMode mode;

  __device__ __forceinline__ real finish(real unit) const {
    if (clamp > 0) unit = unit > clamp ? clamp : (unit < -clamp ? -clamp : unit);
    return unit * upstream;
  }
  __device__ __forceinline__ real softmax_part(real logit) const {
    return weight == 0 ? real(0) : weight * exp_of(logit - lse);
  }
  // Of an element that is neither the blank's nor the target's.
  __device__ __forceinline__ real at(real logit) const { return finish(softmax_part(logit)); }
  __device__ __forceinline__ real at_target(real logit) const {
    return finish(softmax_part(logit) - emit);
  }
  __device__ __forceinline__ real at_blank(real logit) const {
    if (mode == LogitMode::kHat) return finish(emit * sigmoid(logit) - stay * sigmoid(-logit));
    return finish(softmax_part(logit) - stay);
  }
};

// `columns` elements of a gradient row; those from V on are 0.
template <int lanes, int width, typename scalar>
__device__ __forceinline__ void write_gradient(const RowGradient<acc_type<scalar>>& row,
                                               const scalar* logits, int32_t V, int32_t columns,
                                               int lane, scalar* gradient) {
  using real = acc_type<scalar>;
  constexpr int in_flight = kInFlight<width>;
  for (int32_t begin = lane * width; begin < columns; begin += lanes * width * in_flight) {
    Vector<scalar, width> loaded[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const int32_t v = begin + k * lanes * width;
      if (v < V) loaded[k] = load_vector<width>(logits + v);
    }
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const int32_t v = begin + k * lanes * width;
      if (v >= columns) break;
      Vector<scalar, width> result;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        result.x[i] =
            static_cast<scalar>(v + i < V ? row.at(static_cast<real>(loaded[k].x[i])) : real(0));
      }
      // At most two elements of a row are something else.
      const uint32_t target_at = static_cast<uint32_t>(row.target - v);
      const uint32_t blank_at = static_cast<uint32_t>(row.blank - v);
      if (target_at < width || blank_at < width) {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const real logit = static_cast<real>(loaded[k].x[i]);
          if (target_at == i) result.x[i] = static_cast<scalar>(row.at_target(logit));
          if (blank_at == i) result.x[i] = static_cast<scalar>(row.at_blank(logit));
        }
      }
      store_vector<width>(gradient + v, result);
    }
  }
}

template <typename scalar, int lanes, int width>
__global__ void __launch_bounds__(kRowThreads)
    log_probs_backward_kernel(RowGeometry geometry, SymbolTable symbols, RowRange range,
                              LogitMode mode, acc_type<scalar> emit_factor, acc_type<scalar> clamp,
                              const acc_type<scalar>* grad_loss, const acc_type<scalar>* lse,
                              const acc_type<scalar>* gx, const acc_type<scalar>* gy,
                              const scalar* logits, int64_t stride, scalar* gradients,
                              int64_t gradient_stride, int32_t columns) {
  using real = acc_type<scalar>;
  const int lane = threadIdx.x % lanes;
  int64_t row = range.first_row<lanes>();
  if (row >= range.count) return;
  RowCursor node(geometry, range.begin + row);
  for (int step = 0; step < range.rows_each; ++step) {
    scalar* gradient = gradients + row * gradient_stride;
    const real emit = emit_factor * gx[range.begin + row], stay = gy[range.begin + row];
    if (!node.valid() || emit + stay == 0) {
      for (int32_t v = lane * width; v < columns; v += lanes * width) {
        store_zeros<width>(gradient + v);
      }
    } else {
      const int32_t y = node.emits() ? symbols.symbol(node.n(), node.u()) : -1;
      real weight = 0;
      if (mode != LogitMode::kLogProbs) weight = mode == LogitMode::kHat ? emit : emit + stay;
      const RowGradient<real> unit{
          lse[range.begin + row], emit, stay, weight, grad_loss[node.n()], clamp,
          symbols.blank,          y,    mode};
      write_gradient<lanes, width>(unit, logits + row * stride, symbols.V, columns, lane, gradient);
    }
    row += range.groups_abreast<lanes>();
    if (row >= range.count) return;
    node.advance(range.groups_abreast<lanes>());
  }
}

void log_probs_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& lse,
                        const Tensor& gx, const Tensor& gy, const Tensor& targets,
                        const Tensor& logit_lengths, const Tensor& target_lengths,
                        const OptionalTensor& start, const OptionalTensor& row_splits, int64_t T,
                        int64_t S, int64_t row_begin, int64_t blank, int64_t mode,
                        double fastemit_lambda, double clamp, const Tensor& grad_logits) {
  const int64_t V = logits.size(1), columns = grad_logits.size(1), rows = logits.size(0);
  const int64_t stride = logits.stride(0), gradient_stride = grad_logits.stride(0);
  if (rows == 0) return;
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             targets.size(1));
  const SymbolTable symbols(targets, V, blank);
  const Launcher launch(logits);
  dispatch_floating(logits.scalar_type(), "log_probs_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* data = data_of<scalar>(logits);
    scalar* gradients = mutable_data_of<scalar>(grad_logits);
    // Vectors may not reach behind `columns`, where the next row begins.
    int widest = std::min(widest_vector<scalar>(data, stride),
                          widest_vector<scalar>(gradients, gradient_stride));
    if (columns % widest != 0) widest = 1;
    dispatch_width<scalar>(widest, [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      dispatch_lanes(columns, width, rows, [&](auto lanes_constant) {
        constexpr int lanes = decltype(lanes_constant)::value;
        const RowRange range = RowRange::of<lanes>(row_begin, rows);
        launch(log_probs_backward_kernel<scalar, lanes, width>, range.blocks<lanes>(), kRowThreads,
               0, geometry, symbols, range, static_cast<LogitMode>(mode),
               static_cast<real>(1 + fastemit_lambda), static_cast<real>(clamp),
               data_of<real>(grad_loss), data_of<real>(lse), data_of<real>(gx), data_of<real>(gy),
               data, stride, gradients, gradient_stride, static_cast<int32_t>(columns));
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("log_probs_backward", TORCH_BOX(&log_probs_backward));
}

}  // namespace cuda
}  // namespace pruned_rnnt
