// log_probs: log-probabilities of blank and of the next symbol at every lattice node, from one
// reading of the logits. Modes, formulas and layout: pruned_rnnt/ops/log_probs.py.
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

// Vectors a lane has in flight at a time: many, but their elements have to stay in registers.
template <int width>
constexpr int kInFlight = width >= 8 ? 2 : 4;

// The log-sum-exp of V logits by the lanes of a group; `skipped` is left out.
template <int lanes, int width, typename scalar>
__device__ __forceinline__ acc_type<scalar> group_log_sum(const scalar* logits, int32_t V,
                                                          int32_t skipped, int lane) {
  using real = acc_type<scalar>;
  constexpr int in_flight = kInFlight<width>;
  ExpSum<real> sum;
  for (int32_t begin = lane * width; begin < V; begin += lanes * width * in_flight) {
    Vector<scalar, width> loaded[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const int32_t v = begin + k * lanes * width;
      if (v < V) loaded[k] = load_vector<width>(logits + v);
    }
    real x[in_flight * width];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const int32_t v = begin + k * lanes * width + i;
        const bool used = v < V && v != skipped;
        x[k * width + i] = used ? static_cast<real>(loaded[k].x[i]) : minus_infinity<real>();
      }
    }
    sum.add(x);
  }
  sum.template merge_lanes<(lanes < 32 ? lanes : 32)>();
  if (lanes > 32) {
    __shared__ real maxima[32], sums[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      maxima[threadIdx.x / 32] = sum.maximum;
      sums[threadIdx.x / 32] = sum.sum;
    }
    __syncthreads();
    sum = ExpSum<real>();
    for (int warp = 0; warp < lanes / 32; ++warp) sum.merge(maxima[warp], sums[warp]);
  }
  return sum.log_sum();
}

template <typename scalar, int lanes, int width>
__global__ void __launch_bounds__(kRowThreads)
    log_probs_kernel(RowGeometry geometry, SymbolTable symbols, RowRange range, LogitMode mode,
                     const scalar* __restrict__ logits, int64_t stride,
                     acc_type<scalar>* __restrict__ px, acc_type<scalar>* __restrict__ py,
                     acc_type<scalar>* __restrict__ lse) {
  using real = acc_type<scalar>;
  const int lane = threadIdx.x % lanes;
  // Rows are all that decides on the way of a group; of a warp's groups none may leave early.
  int64_t row = range.first_row<lanes>();
  RowCursor node(geometry, range.begin + (row < range.count ? row : range.count - 1));
  for (int step = 0; step < range.rows_each; ++step) {
    const bool exists = row < range.count;
    const bool used = exists && node.valid();
    const scalar* x = logits + (exists ? row : 0) * stride;
    real normaliser = 0, emit = minus_infinity<real>(), stay = minus_infinity<real>();
    if (mode != LogitMode::kLogProbs && any_group_uses<lanes>(used)) {
      normaliser = group_log_sum<lanes, width>(x, used ? symbols.V : 0,
                                               mode == LogitMode::kHat ? symbols.blank : -1, lane);
    }
    if (used && lane == 0) {
      const real blank_logit = static_cast<real>(x[symbols.blank]);
      const bool dead = normaliser == minus_infinity<real>();
      if (mode == LogitMode::kHat) {
        stay = log_sigmoid(blank_logit);
      } else if (!dead) {
        stay = blank_logit - normaliser;
      }
      const int32_t y = node.emits() ? symbols.symbol(node.n(), node.u()) : -1;
      if (y >= 0 && !dead) {
        emit = static_cast<real>(x[y]) - normaliser;
        if (mode == LogitMode::kHat) emit += log_sigmoid(-blank_logit);
      }
    }
    if (exists && lane == 0) {
      px[range.begin + row] = emit;
      py[range.begin + row] = stay;
      lse[range.begin + row] = used ? normaliser : real(0);
    }
    row += range.groups_abreast<lanes>();
    if (row < range.count) node.advance(range.groups_abreast<lanes>());
  }
}

void log_probs(const Tensor& logits, const Tensor& targets, const Tensor& logit_lengths,
               const Tensor& target_lengths, const OptionalTensor& start,
               const OptionalTensor& row_splits, int64_t T, int64_t S, int64_t row_begin,
               int64_t blank, int64_t mode, const Tensor& px, const Tensor& py, const Tensor& lse) {
  const int64_t V = logits.size(1), stride = logits.stride(0);
  if (logits.size(0) == 0) return;
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             targets.size(1));
  const SymbolTable symbols(targets, V, blank);
  const Launcher launch(logits);
  dispatch_floating(logits.scalar_type(), "log_probs", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* data = data_of<scalar>(logits);
    dispatch_width<scalar>(widest_vector<scalar>(data, stride), [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      dispatch_lanes(V, width, logits.size(0), [&](auto lanes_constant) {
        constexpr int lanes = decltype(lanes_constant)::value;
        const RowRange range = RowRange::of<lanes>(row_begin, logits.size(0));
        launch(log_probs_kernel<scalar, lanes, width>, range.blocks<lanes>(), kRowThreads, 0,
               geometry, symbols, range, static_cast<LogitMode>(mode), data, stride,
               mutable_data_of<real>(px), mutable_data_of<real>(py), mutable_data_of<real>(lse));
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) { m.impl("log_probs", TORCH_BOX(&log_probs)); }

}  // namespace cuda
}  // namespace pruned_rnnt
