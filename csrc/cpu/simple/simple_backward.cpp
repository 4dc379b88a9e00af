// simple_backward: gradients of the trivial joiner's inputs. Formulas and contract:
// pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V symbols. A row of am belongs to a frame and has a
// partner in every row of lm, and the other way round; both gradients are therefore one function.
#include <vector>

#include "contracts/simple.h"
#include "cpu/common/fresh_memory.h"
#include "cpu/common/parallel.h"
#include "cpu/common/rows.h"
#include "joiner_options.h"
#include "op.h"
#include "simple_batch.h"
#include "symbol_table.h"

namespace pruned_rnnt {
namespace {

struct ExpTimes {
  // out(v) = exp(x(v) - shift) * sum(v).
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE void run(const scalar* x, const real* sum, int64_t size, real shift,
                                     real* out) {
#pragma omp simd
    for (int64_t v = 0; v < size; ++v) {
      out[v] = exp_of_nonpositive(static_cast<real>(x[v]) - shift) * sum[v];
    }
  }
};

struct AddSoftmax {
  // out(v) += factor * exp(x(v) + other(v) - shift); `other` may be null.
  template <typename scalar, typename other_scalar, typename real>
  static PRUNED_RNNT_INLINE void run(const scalar* x, const other_scalar* other, int64_t size,
                                     real shift, real factor, real* out) {
    if (other != nullptr) {
#pragma omp simd
      for (int64_t v = 0; v < size; ++v) {
        const real sum = static_cast<real>(x[v]) + static_cast<real>(other[v]);
        out[v] += factor * exp_of_nonpositive(sum - shift);
      }
    } else {
#pragma omp simd
      for (int64_t v = 0; v < size; ++v) {
        out[v] += factor * exp_of_nonpositive(static_cast<real>(x[v]) - shift);
      }
    }
  }
};

// Occupancies of the nodes, and what their products need.
template <typename scalar>
struct Occupancies {
  using real = acc_type<scalar>;
  const real *emit_occupancy, *blank_occupancy, *product, *logz;
  real emit_factor;

  real emit(int64_t node) const { return emit_factor * emit_occupancy[node]; }
  real leaving(int64_t node) const { return emit(node) + blank_occupancy[node]; }
  bool exact(int64_t node) const {
    return !(product[node] >= kSafeProduct<real>) && leaving(node) != 0;
  }
};

// One side (am or lm) of the joiner.
template <typename scalar>
struct Side {
  using real = acc_type<scalar>;
  const scalar* x;
  const real *row_max, *x_sum;
  // Smoothing: the row's own normaliser, and the prior that was added (am only); else null.
  const real *lse, *prior;
  real own_scale;
};

// The gradient of row `row` of `side`. Its nodes are first_node, first_node + step, ...; the
// partner of node k is row k of `partners`.
template <typename scalar, typename real>
void dense_gradient(const Side<scalar>& side, int64_t row, const scalar* partners,
                    const Occupancies<scalar>& occupancies, int64_t first_node, int64_t step,
                    int64_t count, real combined, real upstream, int64_t V, real* gradient) {
  const scalar* x = side.x + row * V;
  run_vectorised<ExpTimes>(x, side.x_sum + row * V, V, side.row_max[row], gradient);
  double total = 0;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t node = first_node + k * step;
    total += static_cast<double>(occupancies.leaving(node));
    if (combined == 0 || !occupancies.exact(node)) continue;
    run_vectorised<AddSoftmax>(x, partners + k * V, V, occupancies.logz[node],
                               upstream * combined * occupancies.leaving(node), gradient);
  }
  // A row of -inf has no softmax, and no path through its nodes.
  if (side.lse != nullptr && total != 0) {
    run_vectorised<AddSoftmax>(x, side.prior, V, side.lse[row],
                               upstream * side.own_scale * static_cast<real>(total), gradient);
  }
}

void simple_backward(const NodeUpstream& nodes, const View& am, const View& lm,
                     const RowMaxima& maxima, const Products& products, const Smoothing& smoothing,
                     const TargetsAndLengths& utterances, const Scales& given_scales,
                     double fastemit_lambda, const View& grad_am, const View& grad_lm) {
  const SimpleBatch batch(nodes.gx, products.product, utterances.logit_lengths,
                          utterances.target_lengths);
  const SymbolTable symbols(utterances.targets, am.size(2), given_scales.blank);
  const int64_t V = symbols.V, T = batch.T, width = batch.width;
  dispatch_floating(am.scalar_type(), "simple_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const SmoothingScales<real> scales(given_scales);
    const real* upstream = data_of<real>(nodes.grad_loss);
    const Occupancies<scalar> occupancies{
        data_of<real>(nodes.gx), data_of<real>(nodes.gy), data_of<real>(products.product),
        data_of<real>(products.logz), static_cast<real>(1 + fastemit_lambda)};
    const auto lse_of = [](const OptionalView& lse, real scale) {
      return scale != 0 ? data_or_null<real>(lse) : nullptr;
    };
    const Side<scalar> acoustic{data_of<scalar>(am),
                                data_of<real>(maxima.am_max),
                                data_of<real>(products.am_sum),
                                lse_of(smoothing.am_lse, scales.am_only),
                                data_or_null<real>(smoothing.log_q),
                                scales.am_only};
    const Side<scalar> language{data_of<scalar>(lm),
                                data_of<real>(maxima.lm_max),
                                data_of<real>(products.lm_sum),
                                lse_of(smoothing.lm_lse, scales.lm_only),
                                nullptr,
                                scales.lm_only};

    const auto am_row = [&](int64_t row, real* gradient) {
      const int64_t n = row / T, first = row * width, columns = batch.columns(n);
      dense_gradient(acoustic, row, language.x + n * width * V, occupancies, first, 1, columns,
                     scales.combined, upstream[n], V, gradient);
      const real scale = (scales.combined + scales.am_only) * upstream[n];
      double stay = 0;
      for (int64_t u = 0; u < columns; ++u) {
        const int64_t y = symbols.symbol(n, u);
        if (y >= 0) gradient[y] -= scale * occupancies.emit(first + u);
        stay += static_cast<double>(occupancies.blank_occupancy[first + u]);
      }
      gradient[symbols.blank] -= scale * static_cast<real>(stay);
    };
    const auto lm_row = [&](int64_t row, real* gradient) {
      const int64_t n = row / width, u = row % width, first = n * T * width + u;
      dense_gradient(language, row, acoustic.x + n * T * V, occupancies, first, width,
                     batch.frames(n), scales.combined, upstream[n], V, gradient);
      const real scale = (scales.combined + scales.lm_only) * upstream[n];
      double emit = 0, stay = 0;
      for (int64_t t = 0; t < batch.frames(n); ++t) {
        emit += static_cast<double>(occupancies.emit(first + t * width));
        stay += static_cast<double>(occupancies.blank_occupancy[first + t * width]);
      }
      const int64_t y = symbols.symbol(n, u);
      if (y >= 0) gradient[y] -= scale * static_cast<real>(emit);
      gradient[symbols.blank] -= scale * static_cast<real>(stay);
    };
    // Rows are computed in the accumulator type and stored once, so that a gradient may overwrite
    // the sums that it is computed from.
    const auto all_rows = [&](const View& output, int64_t rows, auto&& is_inside, auto&& compute) {
      scalar* gradients = mutable_data_of<scalar>(output);
      expect_full_write(output);
      parallel_tasks(rows, rows_per_task(2 * V), [&](int64_t begin, int64_t end) {
        std::vector<real> gradient(V);
        for (int64_t row = begin; row < end; ++row) {
          scalar* target = gradients + row * V;
          if (!is_inside(row)) {
            std::fill(target, target + V, scalar(0.0f));
            continue;
          }
          compute(row, gradient.data());
          std::transform(gradient.begin(), gradient.end(), target,
                         [](real value) { return static_cast<scalar>(value); });
        }
      });
    };
    all_rows(
        grad_am, batch.N * T, [&](int64_t row) { return row % T < batch.frames(row / T); }, am_row);
    all_rows(
        grad_lm, batch.N * width,
        [&](int64_t row) { return row % width < batch.columns(row / width); }, lm_row);
  });
}

PRUNED_RNNT_CPU_OP(simple_backward)

}  // namespace
}  // namespace pruned_rnnt
