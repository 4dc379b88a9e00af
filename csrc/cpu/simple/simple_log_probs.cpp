// simple_log_probs, simple_weights: log-probabilities of the trivial joiner from the matrix product
// of exponentials, and the factors of its gradient. Formulas and contracts:
// pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V symbols.
#include "contracts/simple.h"
#include "cpu/common/parallel.h"
#include "cpu/common/rows.h"
#include "joiner_options.h"
#include "op.h"
#include "simple_batch.h"
#include "symbol_table.h"

namespace pruned_rnnt {
namespace {

struct SafeLogarithm {
  // logz(u) = log product(u) + maxima where product is safe; overwritten elsewhere.
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const real* product, const real* lm_max, real am_max,
                                     int64_t size, real* logz) {
#pragma omp simd
    for (int64_t u = 0; u < size; ++u) {
      const real safe = product[u] >= kSafeProduct<real> ? product[u] : real(1);
      logz[u] = log_of_positive(safe) + am_max + lm_max[u];
    }
  }
};

struct SumLogSumExp {
  // log sum_v exp(am(v) + lm(v)).
  template <typename scalar>
  static PRUNED_RNNT_INLINE acc_type<scalar> run(const scalar* am, const scalar* lm, int64_t size) {
    using real = acc_type<scalar>;
    const auto sum_at = [=](int64_t v) {
      return static_cast<real>(am[v]) + static_cast<real>(lm[v]);
    };
    const real shift = finite_or_zero(largest_of<real>(size, sum_at));
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t v = 0; v < size; ++v) {
      sum += exp_of_nonpositive(sum_at(v) - shift);
    }
    return shift + std::log(sum);
  }
};

void simple_log_probs(const View& am, const View& lm, const RowMaxima& maxima, const View& product,
                      const Smoothing& smoothing, const TargetsAndLengths& utterances,
                      const Scales& given_scales, const NodeScores& out) {
  const SimpleBatch batch(out.px, product, utterances.logit_lengths, utterances.target_lengths);
  const SymbolTable symbols(utterances.targets, am.size(2), given_scales.blank);
  const int64_t V = symbols.V, width = batch.width, frames = int64_t{batch.N} * batch.T;
  dispatch_floating(am.scalar_type(), "simple_log_probs", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const SmoothingScales<real> scales(given_scales);
    const auto& [lm_lse, am_lse, log_q] = smoothing;
    const real* lm_normaliser = scales.lm_only != 0 ? data_or_null<real>(lm_lse) : nullptr;
    const real* am_normaliser = scales.am_only != 0 ? data_or_null<real>(am_lse) : nullptr;
    const real* prior = data_or_null<real>(log_q);
    const real* products = data_of<real>(product);
    real *emit = mutable_data_of<real>(out.px), *stay = mutable_data_of<real>(out.py);
    real* normaliser = mutable_data_of<real>(out.logz);

    const auto clear = [&](int64_t begin, int64_t end) {
      std::fill(emit + begin, emit + end, minus_infinity<real>);
      std::fill(stay + begin, stay + end, minus_infinity<real>);
      std::fill(normaliser + begin, normaliser + end, real(0));
    };
    const auto frame_log_probs = [&](int64_t n, int64_t t) {
      const int64_t frame = n * batch.T + t, row = frame * width;
      const scalar* acoustic = data_of<scalar>(am) + frame * V;
      const scalar* language = data_of<scalar>(lm) + n * width * V;
      const int64_t columns = batch.columns(n);
      run_vectorised<SafeLogarithm>(products + row, data_of<real>(maxima.lm_max) + n * width,
                                    data_of<real>(maxima.am_max)[frame], columns, normaliser + row);
      for (int64_t u = 0; u < columns; ++u) {
        const scalar* lm_row = language + u * V;
        if (!(products[row + u] >= kSafeProduct<real>)) {
          normaliser[row + u] = run_vectorised<SumLogSumExp>(acoustic, lm_row, V);
        }
        const real z = normaliser[row + u];
        const auto log_prob = [&](int64_t v) {
          const real a = static_cast<real>(acoustic[v]), l = static_cast<real>(lm_row[v]);
          real p = 0;
          if (scales.combined != 0) p += scales.combined * (a + l - z);
          if (lm_normaliser) p += scales.lm_only * (l - lm_normaliser[n * width + u]);
          if (am_normaliser) p += scales.am_only * (a + prior[v] - am_normaliser[frame]);
          return p;
        };
        const bool possible = z != minus_infinity<real>;
        const int64_t y = u < columns - 1 ? symbols.symbol(n, u) : -1;
        emit[row + u] = possible && y >= 0 ? log_prob(y) : minus_infinity<real>;
        stay[row + u] = possible ? log_prob(symbols.blank) : minus_infinity<real>;
      }
      clear(row + columns, row + width);
    };
    parallel_tasks(frames, rows_per_task(16 * width), [&](int64_t begin, int64_t end) {
      for (int64_t frame = begin; frame < end; ++frame) {
        const int64_t n = frame / batch.T, t = frame % batch.T;
        if (t < batch.frames(n)) {
          frame_log_probs(n, t);
        } else {
          clear(frame * width, (frame + 1) * width);
        }
      }
    });
  });
}

struct WeightsRow {
  template <typename real>
  static PRUNED_RNNT_INLINE void run(const real* gx, const real* gy, const real* product,
                                     int64_t size, real emit_factor, real scale, real* weights) {
#pragma omp simd
    for (int64_t u = 0; u < size; ++u) {
      const real leaving = gx[u] * emit_factor + gy[u];
      // If `leaving` is 0, the product may be NaN.
      const bool used = product[u] >= kSafeProduct<real> && leaving != 0;
      weights[u] = used ? leaving * scale / product[u] : real(0);
    }
  }
};

void simple_weights(const View& grad_loss, const View& gx, const View& gy, const View& product,
                    const View& logit_lengths, const View& target_lengths, double scale,
                    double fastemit_lambda, const View& weights) {
  const SimpleBatch batch(gx, product, logit_lengths, target_lengths);
  const int64_t width = batch.width, frames = int64_t{batch.N} * batch.T;
  dispatch_accumulator(product.scalar_type(), "simple_weights", [&](auto zero) {
    using real = decltype(zero);
    const real emit_factor = static_cast<real>(1 + fastemit_lambda);
    const real* upstream = data_of<real>(grad_loss);
    const real *emit = data_of<real>(gx), *stay = data_of<real>(gy);
    const real* products = data_of<real>(product);
    real* output = mutable_data_of<real>(weights);
    parallel_tasks(frames, rows_per_task(width), [&](int64_t begin, int64_t end) {
      for (int64_t frame = begin; frame < end; ++frame) {
        const int64_t n = frame / batch.T, row = frame * width;
        const int64_t columns = frame % batch.T < batch.frames(n) ? batch.columns(n) : 0;
        run_vectorised<WeightsRow>(emit + row, stay + row, products + row, columns, emit_factor,
                                   static_cast<real>(scale) * upstream[n], output + row);
        std::fill(output + row + columns, output + row + width, real(0));
      }
    });
  });
}

PRUNED_RNNT_CPU_OP(simple_log_probs)
PRUNED_RNNT_CPU_OP(simple_weights)

}  // namespace
}  // namespace pruned_rnnt
