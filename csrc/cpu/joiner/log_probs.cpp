// log_probs: log-probabilities of blank and of the next symbol at every lattice node, and the
// gradient of the loss by the logits. Contract: pruned_rnnt/ops/joiner/log_probs.py.
#include "contracts/rows.h"
#include "cpu/common/fresh_memory.h"
#include "cpu/common/log_sum_exp.h"
#include "cpu/common/rows.h"
#include "joiner_options.h"
#include "op.h"
#include "symbol_table.h"

namespace pruned_rnnt {
namespace {

// Replaces by zero what adds nothing to a sum of gradients. Off its path, the occupancies of a
// trained model become subnormal, and the matrix products of such gradients take Intel's processors
// more than twice as long.
template <typename real>
PRUNED_RNNT_INLINE real without_tiny(real x) {
  // Far enough above the smallest normal number that products with weights are normal, too.
  constexpr real least = std::numeric_limits<real>::min() * (1 << 27);
  return std::fabs(x) < least ? real(0) : x;
}

// unit(v) = weight * exp(x(v) - lse), clamped to [-clamp, clamp] if clamp > 0, times scale.
struct SoftmaxGradient {
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE void run(const scalar* x, int64_t size, real lse, real weight,
                                     real clamp, real scale, scalar* gradient) {
    if (clamp > 0) {
#pragma omp simd
      for (int64_t v = 0; v < size; ++v) {
        real unit = weight * exp_of_nonpositive(static_cast<real>(x[v]) - lse);
        unit = unit > clamp ? clamp : unit;
        unit = unit < -clamp ? -clamp : unit;
        gradient[v] = static_cast<scalar>(without_tiny(unit * scale));
      }
    } else {
      const real factor = weight * scale;
#pragma omp simd
      for (int64_t v = 0; v < size; ++v) {
        const real unit = factor * exp_of_nonpositive(static_cast<real>(x[v]) - lse);
        gradient[v] = static_cast<scalar>(without_tiny(unit));
      }
    }
  }
};

template <typename real>
real sigmoid(real x) {
  return 1 / (1 + std::exp(-x));
}

void log_probs(const View& logits, const View& targets, const LatticeRows& lattice,
               int64_t row_begin, int64_t blank, int64_t mode_number, const RowLogProbs& out) {
  const RowGeometry geometry(lattice, targets.size(1));
  const int64_t rows = logits.size(0), V = logits.size(1), stride = logits.stride(0);
  const SymbolTable symbols(targets, V, blank);
  const LogitMode mode = static_cast<LogitMode>(mode_number);
  dispatch_floating(logits.scalar_type(), "log_probs", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* all_logits = data_of<scalar>(logits);
    real *emit = mutable_data_of<real>(out.px) + row_begin,
         *stay = mutable_data_of<real>(out.py) + row_begin;
    real* normaliser = mutable_data_of<real>(out.lse) + row_begin;
    for_rows(geometry, row_begin, rows, V, [&](int64_t r, const RowCursor& node) {
      const scalar* x = all_logits + r * stride;
      emit[r] = stay[r] = minus_infinity<real>;
      normaliser[r] = 0;
      if (!node.valid()) return;
      const real blank_logit = static_cast<real>(x[blank]);
      real emit_base = 0;
      if (mode == LogitMode::kHat) {
        normaliser[r] = total(run_vectorised<LogSumExpNonBlank>(x, V, blank));
        stay[r] = log_sigmoid(blank_logit);
        emit_base = log_sigmoid(-blank_logit);
      } else {
        if (mode == LogitMode::kSoftmax) normaliser[r] = total(run_vectorised<LogSumExp>(x, V));
        if (normaliser[r] != minus_infinity<real>) stay[r] = blank_logit - normaliser[r];
      }
      const int32_t symbol = symbols.emitted_from(node);
      if (normaliser[r] == minus_infinity<real> || symbol < 0) return;
      emit[r] = emit_base + (static_cast<real>(x[symbol]) - normaliser[r]);
    });
  });
}

// One row of the gradient: the dense part by a vector loop, then the elements of the blank and the
// target. Their logits are read first because the gradient may overwrite the logits.
template <typename scalar, typename real>
void gradient_row(const scalar* x, int64_t V, int64_t blank, int32_t target, LogitMode mode,
                  real lse, real emit, real stay, real clamp, real scale, scalar* gradient) {
  const auto finish = [&](real unit) {
    if (clamp > 0) unit = std::max(-clamp, std::min(clamp, unit));
    return static_cast<scalar>(without_tiny(unit * scale));
  };
  const real blank_logit = static_cast<real>(x[blank]);
  const real target_logit = target >= 0 ? static_cast<real>(x[target]) : real(0);
  real blank_unit = -stay;
  real target_unit = -emit;
  if (mode == LogitMode::kLogProbs) {
    std::fill(gradient, gradient + V, scalar(0.0f));
  } else {
    const real weight = mode == LogitMode::kHat ? emit : emit + stay;
    if (weight == 0) {
      // HAT with only the blank left: the other symbols may have no normaliser.
      std::fill(gradient, gradient + V, scalar(0.0f));
    } else {
      run_vectorised<SoftmaxGradient>(x, V, lse, weight, clamp, scale, gradient);
      target_unit += weight * exp_of_nonpositive(target_logit - lse);
    }
    if (mode == LogitMode::kHat) {
      blank_unit = emit * sigmoid(blank_logit) - stay * sigmoid(-blank_logit);
    } else {
      blank_unit += weight * exp_of_nonpositive(blank_logit - lse);
    }
  }
  if (target >= 0) gradient[target] = finish(target_unit);
  gradient[blank] = finish(blank_unit);
}

void log_probs_backward(const View& grad_loss, const View& logits, const RowStatistics& statistics,
                        const View& targets, const LatticeRows& lattice, int64_t row_begin,
                        const GradientOptions& options, const View& grad_logits) {
  const RowGeometry geometry(lattice, targets.size(1));
  const int64_t rows = logits.size(0), V = logits.size(1), blank = options.blank;
  const SymbolTable symbols(targets, V, blank);
  const int64_t stride = logits.stride(0), gradient_stride = grad_logits.stride(0);
  // Columns from V on pad the rows for the matrix product.
  const int64_t columns = grad_logits.size(1);
  dispatch_floating(logits.scalar_type(), "log_probs_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* all_logits = data_of<scalar>(logits);
    const real* upstream = data_of<real>(grad_loss);
    const real* normaliser = data_of<real>(statistics.lse) + row_begin;
    const real *emit = data_of<real>(statistics.gx) + row_begin,
               *stay = data_of<real>(statistics.gy) + row_begin;
    scalar* all_gradients = mutable_data_of<scalar>(grad_logits);
    const real emit_factor = static_cast<real>(1 + options.fastemit_lambda);
    expect_full_write(grad_logits);
    for_rows(geometry, row_begin, rows, V, [&](int64_t r, const RowCursor& node) {
      scalar* gradient = all_gradients + r * gradient_stride;
      const real scaled_emit = emit_factor * emit[r];
      const bool used = node.valid() && scaled_emit + stay[r] != 0;
      std::fill(gradient + (used ? V : 0), gradient + columns, scalar(0.0f));
      if (!used) return;
      gradient_row(all_logits + r * stride, V, blank, symbols.emitted_from(node),
                   static_cast<LogitMode>(options.mode), normaliser[r], scaled_emit, stay[r],
                   static_cast<real>(options.clamp), upstream[node.n()], gradient);
    });
  });
}

PRUNED_RNNT_CPU_OP(log_probs)
PRUNED_RNNT_CPU_OP(log_probs_backward)

}  // namespace
}  // namespace pruned_rnnt
