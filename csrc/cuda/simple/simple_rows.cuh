// Rows of the trivial joiner's gradients: exponentials times sums, less the emitted symbols.
// Formulas: simple_log_probs.py of pruned_rnnt/ops/simple.
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
// gradient `pitch` elements apart; the sums of an utterance are sums_apart elements apart, those of
// a row sum_pitch.
template <typename scalar>
struct Side {
  using real = acc_type<scalar>;
  const scalar* x;
  const real *row_max, *x_sum;
  // Smoothing: the rows' own normaliser, and the prior that was added (am only); else null.
  const real *lse, *prior;
  real own_scale;
  scalar* gradient;
  int64_t rows, sums_apart, sum_pitch, pitch;
};

template <typename scalar>
struct SimpleProblem {
  SimpleBatch batch;
  SymbolTable symbols;
  Occupancies<acc_type<scalar>> occupancies;
  acc_type<scalar> combined;
  Side<scalar> am, lm;
};

// The nodes of a row of am (the columns of its frame) or of lm (its column of the frames from
// `frame` on); the partner of node k is row k of `partners`.
template <typename scalar>
struct RowNodes {
  int64_t frame;
  int32_t column;  // -1: all columns of one frame
  int32_t count;
  const scalar* partners;
};

// A row's gradient before the emitted symbols are subtracted. has_exact: whether some of its nodes
// are not part of the matrix products, a rare case with its own variant so that others are not
// slowed.
template <typename scalar, bool has_exact>
struct RowGradient {
  using real = acc_type<scalar>;

  __device__ RowGradient(const SimpleProblem<scalar>& problem, const Side<scalar>& side,
                         const RowNodes<scalar>& nodes, int32_t n, int32_t index, real leaving)
      : occupancies(problem.occupancies),
        nodes(nodes),
        V(problem.symbols.V),
        combined(problem.combined * problem.occupancies.grad_loss[n]),
        prior(side.prior) {
    const int64_t row = n * side.rows + index;
    x = side.x + row * V;
    gradient = side.gradient + row * side.pitch;
    row_max = side.row_max[row];
    x_sum = side.x_sum + n * side.sums_apart + index * side.sum_pitch;
    if (side.lse != nullptr) {
      own = side.own_scale * problem.occupancies.grad_loss[n] * leaving;
      lse = side.lse[row];
    }
  }

  RNNT_DEVICE real at(int32_t v) const { return from(v, x[v], x_sum[v]); }

  // Element v from its factors, which are read already.
  RNNT_DEVICE real from(int32_t v, scalar x_of_v, real sum) const {
    const real own_x = static_cast<real>(x_of_v);
    real value = exp_of(own_x - row_max) * sum;
    if (own != 0) value += own * exp_of(own_x + (prior != nullptr ? prior[v] : real(0)) - lse);
    if constexpr (has_exact) {
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
  const RowNodes<scalar>& nodes;
  int32_t V;
  real combined;  // times the incoming gradient
  const real* prior;
  real own = 0, lse = 0;  // weight and normaliser of the row's own softmax
  real row_max;
  const scalar* x;
  scalar* gradient;
  const real* x_sum;
};

// Writes a row's gradient by a warp, all but the emitted symbols.
template <int width, typename scalar, bool has_exact>
RNNT_DEVICE void write_row(const RowGradient<scalar, has_exact>& row) {
  using real = acc_type<scalar>;
  // Sums are read in parts of 16 bytes.
  constexpr int part = width * sizeof(real) > 16 ? 16 / sizeof(real) : width;
#pragma unroll 2
  for (int32_t v = threadIdx.x % 32 * width; v < row.V; v += 32 * width) {
    const Vector<scalar, width> x = load_vector<width>(row.x + v);
    Vector<real, part> sums[width / part];
#pragma unroll
    for (int i = 0; i < width / part; ++i) sums[i] = load_vector<part>(row.x_sum + v + i * part);
    Vector<scalar, width> result;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      result.x[i] = static_cast<scalar>(row.from(v + i, x.x[i], sums[i / part].x[i % part]));
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
template <typename scalar, bool has_exact, typename At, typename Amount>
RNNT_DEVICE void subtract(const RowGradient<scalar, has_exact>& row, int32_t count, At&& at,
                          Amount&& amount) {
  using real = acc_type<scalar>;
  // Independent elements processed at a time.
  constexpr int in_flight = 4;
  for (int32_t begin = threadIdx.x % 32; begin < count; begin += 32 * in_flight) {
    int32_t v[in_flight];
    real value[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      v[k] = begin + 32 * k < count ? at(begin + 32 * k) : -1;
      if (v[k] < 0) continue;
      if constexpr (std::is_same_v<scalar, real>) {
        value[k] = row.gradient[v[k]];
      } else {
        value[k] = row.at(v[k]);
      }
      value[k] -= amount(begin + 32 * k);
    }
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (v[k] >= 0) row.gradient[v[k]] = static_cast<scalar>(value[k]);
    }
  }
}

}  // namespace pruned_rnnt::cuda
