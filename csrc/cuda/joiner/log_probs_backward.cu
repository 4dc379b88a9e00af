// log_probs_backward: gradient of the loss by the logits, which are read once; the gradient may
// overwrite them. That of log-probabilities reads none: it is 0 but for two elements of a row,
// which are written after the device has set all memory to 0, at twice the speed of a kernel that
// writes row by row. Formulas: pruned_rnnt/ops/joiner/log_probs.py.
//
// Axes: R rows, V vocabulary.
#include "contracts/rows.h"
#include "cuda/common/ops.cuh"
#include "cuda/joiner/logits_gradient.cuh"
#include "cuda/joiner/short_rows.cuh"

namespace pruned_rnnt::cuda {
namespace {

template <typename scalar, int lanes, int width>
__global__ void __launch_bounds__(kRowThreads)
    log_probs_backward_kernel(RowGeometry geometry, SymbolTable symbols, RowRange range,
                              GradientInputs<acc_type<scalar>> in, const scalar* logits,
                              int64_t stride, scalar* gradients, int64_t gradient_stride,
                              int32_t columns) {
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

// A thread writes the two elements of a row that are not 0.
template <typename scalar>
__global__ void __launch_bounds__(kRowThreads)
    given_log_probs_backward_kernel(RowGeometry geometry, SymbolTable symbols, int64_t row_begin,
                                    int64_t rows, GradientInputs<acc_type<scalar>> in,
                                    scalar* gradients, int64_t stride) {
  using real = acc_type<scalar>;
  const int64_t row = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= rows) return;
  const RowGradient<real> unit(in, row_begin + row, RowCursor(geometry, row_begin + row), symbols);
  if (!unit.used) return;
  scalar* gradient = gradients + row * stride;
  if (unit.target >= 0) gradient[unit.target] = static_cast<scalar>(unit.at_target(real(0)));
  gradient[unit.blank] = static_cast<scalar>(unit.at_blank(real(0)));
}

// A thread computes a row; gradients are as dense as logits.
template <typename scalar, int width>
__global__ void __launch_bounds__(kShortThreads)
    short_log_probs_backward_kernel(RowGeometry geometry, SymbolTable symbols, int64_t row_begin,
                                    int64_t rows, GradientInputs<acc_type<scalar>> in,
                                    const scalar* logits, scalar* gradients) {
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
    const ExceptionsInVector<acc_type<scalar>> exceptions{unit};
    const auto store = [&](int32_t v, const Vector<scalar, width>& gradient) {
      store_vector<width>(x + v, gradient);
    };
    if (!unit.used) {
      for (int32_t v = 0; v < V; v += width) store_zeros<width>(x + v);
    } else if (unit.plain()) {
#pragma unroll 2
      for (int32_t v = 0; v < V; v += width) {
        store(v, gradient_of<true>(unit, load_vector<width>(x + v), v, V, exceptions));
      }
    } else {
      for (int32_t v = 0; v < V; v += width) {
        store(v, gradient_of<false>(unit, load_vector<width>(x + v), v, V, exceptions));
      }
    }
  }
  __syncthreads();
  copy_block(shared, int32_t(rows_here * V), gradients + first_row * V);
}

}  // namespace

void log_probs_backward(const Launcher& launch, const View& grad_loss, const View& logits,
                        const RowStatistics& statistics, const View& targets,
                        const LatticeRows& lattice, int64_t row_begin,
                        const GradientOptions& options, const View& grad_logits) {
  const int64_t V = logits.size(1), columns = grad_logits.size(1), rows = logits.size(0);
  const int64_t stride = logits.stride(0), gradient_stride = grad_logits.stride(0);
  if (rows == 0) return;
  const RowGeometry geometry(lattice, targets.size(1));
  const SymbolTable symbols(targets, V, options.blank);
  dispatch_floating(logits.scalar_type(), "log_probs_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* data = data_of<scalar>(logits);
    scalar* gradients = mutable_data_of<scalar>(grad_logits);
    const GradientInputs<real> in(grad_loss, statistics, options);
    if (in.mode == LogitMode::kLogProbs) {
      // The caller has filled the gradients with zeros.
      launch(given_log_probs_backward_kernel<scalar>,
             uint32_t((rows + kRowThreads - 1) / kRowThreads), kRowThreads, 0, geometry, symbols,
             row_begin, rows, in, gradients, gradient_stride);
      return;
    }
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
