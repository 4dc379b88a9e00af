// Rows of the trivial joiner's gradients: exponentials times sums, less the emitted symbols.
// Formulas and storage: simple_log_probs.py and simple_products.py of pruned_rnnt/ops/simple.
//
// Axes: N batch, T frames, U symbols, V vocabulary, V' its padded size in storage. A row of am
// belongs to a frame and has every row of lm as a partner, and vice versa, so that both gradients
// share their code.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/vector_access.cuh"
#include "joiner_options.h"
#include "simple_batch.h"
#include "symbol_table.h"

namespace pruned_rnnt::cuda {

// Types, from those of the inputs and of the stored exponentials.
template <typename scalar_, typename stored_>
struct SimpleTypes {
  using scalar = scalar_;  // of inputs and gradients
  using real = acc_type<scalar>;
  using stored = stored_;  // of exponentials: BFloat16 for parts, else real
  // Of the matrix products: 16 bits if both the gradient and the exponentials are.
  using summed = std::conditional_t<std::is_same_v<stored, real> || std::is_same_v<scalar, real>,
                                    real, BFloat16>;
  using widest = std::conditional_t<std::is_same_v<summed, real>, real, scalar>;
};

template <typename real>
struct Occupancies {
  const real *emit_occupancy, *blank_occupancy, *product, *logz, *grad_loss;
  real emit_factor;
  int32_t width, product_width;

  RNNT_DEVICE real emit(int64_t node) const { return emit_factor * emit_occupancy[node]; }
  RNNT_DEVICE real leaving(int64_t node) const { return emit(node) + blank_occupancy[node]; }
  // Whether the product at column u of frame n T + t underflowed: this node is then not part of the
  // matrix products.
  RNNT_DEVICE bool exact(int64_t frame, int32_t u) const {
    return !(product[frame * product_width + u] >= kSafeProduct<real>) &&
           leaving(frame * width + u) != 0;
  }
};

// One side (am or lm) of the joiner. x and gradient have `rows` rows an utterance, those of
// gradient `pitch` elements apart; stored arrays have stored_rows.
template <typename Types>
struct Side {
  using real = typename Types::real;
  const typename Types::scalar* x;
  const typename Types::stored *x_exp, *x_low;  // x_low may be null
  const typename Types::summed* x_sum;
  // Smoothing: the rows' own normaliser, and the prior that was added (am only); else null.
  const real *lse, *prior;
  real own_scale;
  typename Types::scalar* gradient;
  int64_t rows, stored_rows, pitch;
};

template <typename Types>
struct SimpleProblem {
  SimpleBatch batch;
  SymbolTable symbols;
  int32_t stored_V;
  Occupancies<typename Types::real> occupancies;
  typename Types::real combined;
  Side<Types> am, lm;
};

// The nodes of a row of am (the columns of its frame) or of lm (its column of the frames from
// `frame` on); the partner of node k is row k of `partners`.
template <typename Types>
struct RowNodes {
  int64_t frame;
  int32_t column;  // -1: all columns of one frame
  int32_t count;
  const typename Types::scalar* partners;
};

// A row's gradient before the emitted symbols are subtracted. has_exact: whether some of its nodes
// are not part of the matrix products, a rare case with its own variant so that others are not
// slowed.
template <typename Types, bool has_exact>
struct RowGradient {
  using real = typename Types::real;

  __device__ RowGradient(const SimpleProblem<Types>& problem, const Side<Types>& side,
                         const RowNodes<Types>& nodes, int32_t n, int32_t index, real leaving)
      : occupancies(problem.occupancies),
        nodes(nodes),
        V(problem.symbols.V),
        combined(problem.combined * problem.occupancies.grad_loss[n]),
        prior(side.prior) {
    const int64_t row = n * side.rows + index;
    const int64_t stored = (n * side.stored_rows + index) * problem.stored_V;
    x = side.x + row * V;
    gradient = side.gradient + row * side.pitch;
    x_exp = side.x_exp + stored;
    x_low = side.x_low != nullptr ? side.x_low + stored : nullptr;
    x_sum = side.x_sum + stored;
    if (side.lse != nullptr) {
      own = side.own_scale * problem.occupancies.grad_loss[n] * leaving;
      lse = side.lse[row];
    }
  }

  // Element v, from the stored factors.
  RNNT_DEVICE real at(int32_t v) const {
    real e = static_cast<real>(x_exp[v]);
    if (x_low != nullptr) e += static_cast<real>(x_low[v]);
    return with_rare_terms(v, e * static_cast<real>(x_sum[v]));
  }

  RNNT_DEVICE real with_rare_terms(int32_t v, real value) const {
    if (own != 0) {
      real shifted = static_cast<real>(x[v]);
      if (prior != nullptr) shifted += prior[v];
      value += own * exp_of(shifted - lse);
    }
    if constexpr (has_exact) {
      const real own_x = static_cast<real>(x[v]);
      for (int32_t k = 0; k < nodes.count; ++k) {
        const int64_t frame = nodes.column < 0 ? nodes.frame : nodes.frame + k;
        const int32_t u = nodes.column < 0 ? k : nodes.column;
        if (!occupancies.exact(frame, u)) continue;
        const int64_t node = frame * occupancies.width + u;
        const real partner = static_cast<real>(nodes.partners[int64_t(k) * V + v]);
        value +=
            combined * occupancies.leaving(node) * exp_of(own_x + partner - occupancies.logz[node]);
      }
    }
    return value;
  }

  const Occupancies<real>& occupancies;
  const RowNodes<Types>& nodes;
  int32_t V;
  real combined;  // times the incoming gradient
  const real* prior;
  real own = 0, lse = 0;  // weight and normaliser of the row's own softmax
  const typename Types::scalar* x;
  typename Types::scalar* gradient;
  const typename Types::stored *x_exp, *x_low;
  const typename Types::summed* x_sum;
};

// Writes a row's gradient by a warp, all but the emitted symbols.
template <int width, typename Types, bool has_exact>
RNNT_DEVICE void write_row(const RowGradient<Types, has_exact>& row) {
  using real = typename Types::real;
  using stored = typename Types::stored;
#pragma unroll 2
  for (int32_t v = threadIdx.x % 32 * width; v < row.V; v += 32 * width) {
    const Vector<stored, width> e = load_vector<width>(row.x_exp + v);
    const Vector<typename Types::summed, width> sum = load_vector<width>(row.x_sum + v);
    Vector<stored, width> low{};
    if (row.x_low != nullptr) low = load_vector<width>(row.x_low + v);
    Vector<typename Types::scalar, width> result;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const real value = static_cast<real>(e.x[i]) + static_cast<real>(low.x[i]);
      result.x[i] = static_cast<typename Types::scalar>(
          row.with_rare_terms(v + i, value * static_cast<real>(sum.x[i])));
    }
    store_vector<width>(row.gradient + v, result);
  }
}

template <int width, typename scalar>
RNNT_DEVICE void write_zeros(scalar* row, int64_t count) {
  for (int64_t i = threadIdx.x % 32 * width; i < count; i += 32 * width) {
    store_zeros<width>(row + i);
  }
}

// Subtracts amount(i) from element at(i), for i = lane, lane + 32, .. < count, of a row that
// write_row has written before a barrier. Elements differ; negative ones are skipped. If the
// gradient is narrower than the accumulator, an element is computed again, so that it is rounded
// once; if it is not, it may have overwritten its factors.
template <typename Types, bool has_exact, typename At, typename Amount>
RNNT_DEVICE void subtract(const RowGradient<Types, has_exact>& row, int32_t count, At&& at,
                          Amount&& amount) {
  using real = typename Types::real;
  // Independent elements processed at a time.
  constexpr int in_flight = 4;
  for (int32_t begin = threadIdx.x % 32; begin < count; begin += 32 * in_flight) {
    int32_t v[in_flight];
    real value[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      v[k] = begin + 32 * k < count ? at(begin + 32 * k) : -1;
      if (v[k] < 0) continue;
      if constexpr (std::is_same_v<typename Types::scalar, real>) {
        value[k] = row.gradient[v[k]];
      } else {
        value[k] = row.at(v[k]);
      }
      value[k] -= amount(begin + 32 * k);
    }
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (v[k] >= 0) row.gradient[v[k]] = static_cast<typename Types::scalar>(value[k]);
    }
  }
}

}  // namespace pruned_rnnt::cuda
