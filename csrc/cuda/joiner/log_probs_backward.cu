// log_probs_backward: gradient of the loss by the logits, which are read once; the gradient may
// overwrite them. Formulas: pruned_rnnt/ops/joiner/log_probs.py.
//
// Axes: R rows, V vocabulary.
#include "cuda/common/arithmetic.cuh"
#include "cuda/common/ops.cuh"
#include "cuda/joiner/logit_rows.cuh"
#include "cuda/joiner/short_rows.cuh"
#include "row_geometry.h"
#include "symbol_table.h"

namespace pruned_rnnt::cuda {
namespace {

template <typename real>
struct Inputs {
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

  RNNT_DEVICE RowGradient(const Inputs<real>& in, int64_t row, const RowCursor& node,
                          const SymbolTable& symbols)
      : emit(in.emit_factor * in.emit_occupancy[row]),
        stay(in.blank_occupancy[row]),
        is_hat(in.mode == LogitMode::kHat) {
    used = node.valid() && emit + stay != 0;
    if (!used) return;
    lse = in.lse[row];
    clamp = in.clamp;
    upstream = in.grad_loss[node.n()];
    blank = symbols.blank;
    target = symbols.emitted_from(node);
    weight = is_hat ? emit : (in.mode == LogitMode::kLogProbs ? real(0) : emit + stay);
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

// The gradient of `width` logits from v on; 0 from V on.
template <bool plain, int width, typename scalar>
RNNT_DEVICE Vector<scalar, width> gradient_of(const RowGradient<acc_type<scalar>>& row,
                                              const Vector<scalar, width>& logits, int32_t v,
                                              int32_t V) {
  using real = acc_type<scalar>;
  const real factor = row.weight * row.upstream;
  Vector<scalar, width> result;
#pragma unroll
  for (int i = 0; i < width; ++i) {
    const real logit = static_cast<real>(logits.x[i]);
    result.x[i] = static_cast<scalar>(plain ? factor * exp_of(logit - row.lse)
                                            : row.finish(row.softmax_part(logit)));
  }
  // The elements of the target and the blank differ.
  const uint32_t target_at = uint32_t(row.target - v);
  const uint32_t blank_at = uint32_t(row.blank - v);
  if (target_at < width || blank_at < width || v + width > V) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const real logit = static_cast<real>(logits.x[i]);
      if (target_at == i) result.x[i] = static_cast<scalar>(row.at_target(logit));
      if (blank_at == i) result.x[i] = static_cast<scalar>(row.at_blank(logit));
      if (v + i >= V) result.x[i] = static_cast<scalar>(0.0f);
    }
  }
  return result;
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
      store_vector<width>(gradient + v, gradient_of<plain>(row, loaded[k], v, V));
    }
  }
}

template <typename scalar, int lanes, int width>
__global__ void __launch_bounds__(kRowThreads)
    log_probs_backward_kernel(RowGeometry geometry, SymbolTable symbols, RowRange range,
                              Inputs<acc_type<scalar>> in, const scalar* logits, int64_t stride,
                              scalar* gradients, int64_t gradient_stride, int32_t columns) {
  const int lane = threadIdx.x % lanes;
  int64_t row = range.first_row<lanes>();
  if (row >= range.count) return;
  RowCursor node(geometry, range.begin + row);
  for (int step = 0; step < range.rows_each; ++step) {
    const scalar* x = logits + row * stride;
    scalar* gradient = gradients + row * gradient_stride;
    const RowGradient<acc_type<scalar>> unit(in, range.begin + row, node, symbols);
    if (!unit.used) {
      for (int32_t v = lane * width; v < columns; v += lanes * width) {
        store_zeros<width>(gradient + v);
      }
    } else if (unit.plain()) {
      write_gradient<true, lanes, width>(unit, x, symbols.V, columns, lane, gradient);
    } else {
      write_gradient<false, lanes, width>(unit, x, symbols.V, columns, lane, gradient);
    }
    row += range.groups_abreast<lanes>();
    if (row >= range.count) return;
    node.advance(range.groups_abreast<lanes>());
  }
}

// A thread computes a row; gradients are as dense as logits.
template <typename scalar, int width>
__global__ void __launch_bounds__(kShortThreads)
    short_log_probs_backward_kernel(RowGeometry geometry, SymbolTable symbols, int64_t row_begin,
                                    int64_t rows, Inputs<acc_type<scalar>> in, const scalar* logits,
                                    scalar* gradients) {
  scalar* const shared = dynamic_shared_memory<scalar>();
  const int32_t V = symbols.V;
  const int64_t first_row = int64_t(blockIdx.x) * kShortThreads;
  const int64_t rows_here = min(int64_t(kShortThreads), rows - first_row);
  const bool exists = threadIdx.x < rows_here;
  copy_block(logits + first_row * V, int32_t(rows_here * V), shared);
  const int64_t row = row_begin + first_row + (exists ? threadIdx.x : 0);
  const RowGradient<acc_type<scalar>> unit(in, row, RowCursor(geometry, row), symbols);
  __syncthreads();
  if (exists) {
    scalar* x = shared + threadIdx.x * V;
    if (!unit.used) {
      for (int32_t v = 0; v < V; v += width) store_zeros<width>(x + v);
    } else if (unit.plain()) {
#pragma unroll 2
      for (int32_t v = 0; v < V; v += width) {
        store_vector<width>(x + v, gradient_of<true>(unit, load_vector<width>(x + v), v, V));
      }
    } else {
      for (int32_t v = 0; v < V; v += width) {
        store_vector<width>(x + v, gradient_of<false>(unit, load_vector<width>(x + v), v, V));
      }
    }
  }
  __syncthreads();
  copy_block(shared, int32_t(rows_here * V), gradients + first_row * V);
}

}  // namespace

void log_probs_backward(const Launcher& launch, const View& grad_loss, const View& logits,
                        const View& lse, const View& gx, const View& gy, const View& targets,
                        const View& logit_lengths, const View& target_lengths,
                        const OptionalView& start, const OptionalView& row_splits, int64_t T,
                        int64_t S, int64_t row_begin, int64_t blank, int64_t mode,
                        double fastemit_lambda, double clamp, const View& grad_logits) {
  const int64_t V = logits.size(1), columns = grad_logits.size(1), rows = logits.size(0);
  const int64_t stride = logits.stride(0), gradient_stride = grad_logits.stride(0);
  if (rows == 0) return;
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             targets.size(1));
  const SymbolTable symbols(targets, V, blank);
  dispatch_floating(logits.scalar_type(), "log_probs_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* data = data_of<scalar>(logits);
    scalar* gradients = mutable_data_of<scalar>(grad_logits);
    const Inputs<real> in{data_of<real>(grad_loss),
                          data_of<real>(lse),
                          data_of<real>(gx),
                          data_of<real>(gy),
                          static_cast<real>(1 + fastemit_lambda),
                          static_cast<real>(clamp),
                          static_cast<LogitMode>(mode)};
    if (are_short_rows<scalar>(data, V, stride) && columns == V &&
        are_short_rows<scalar>(gradients, V, gradient_stride)) {
      dispatch_width<scalar>(short_row_width<scalar>(V), [&](auto width) {
        launch(short_log_probs_backward_kernel<scalar, decltype(width)::value>,
               short_row_blocks(rows), kShortThreads, V * sizeof(scalar) * kShortThreads, geometry,
               symbols, row_begin, rows, in, data, gradients);
      });
      return;
    }
    // Vectors must end at `columns`, where the next row begins.
    int widest = std::min(widest_vector<scalar>(data, stride),
                          widest_vector<scalar>(gradients, gradient_stride));
    if (columns % widest != 0) widest = 1;
    dispatch_width<scalar>(widest, [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      dispatch_lanes(columns, width, rows, [&](auto lanes_constant) {
        constexpr int lanes = decltype(lanes_constant)::value;
        const RowRange range = RowRange::of<lanes>(row_begin, rows);
        launch(log_probs_backward_kernel<scalar, lanes, width>, range.blocks<lanes>(), kRowThreads,
               0, geometry, symbols, range, in, data, stride, gradients, gradient_stride,
               int32_t(columns));
      });
    });
  });
}

PRUNED_RNNT_CUDA_OP(log_probs_backward)

}  // namespace pruned_rnnt::cuda
