// simple_log_probs, simple_weights: log-probabilities of the trivial joiner from the matrix product
// of exponentials, and the factors of its gradient. Formulas and contract:
// pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary.
#include "contracts/simple.h"
#include "cuda/common/arithmetic.cuh"
#include "cuda/common/ops.cuh"
#include "joiner_options.h"
#include "simple_batch.h"
#include "symbol_table.h"

namespace pruned_rnnt::cuda {
namespace {

// Distribution of nodes: threads along the columns of a frame, each for kFramesEach frames, so that
// the data of a column is read once.
constexpr int kNodeThreads = 256;
constexpr int kFramesEach = 8;

struct NodeGrid {
  NodeGrid(const SimpleBatch& batch, int32_t columns) {
    const uint32_t along = std::min<uint32_t>(128, (columns + 31) / 32 * 32);
    block = dim3(along, kNodeThreads / along);
    const uint32_t frames = block.y * kFramesEach;
    grid = dim3((batch.T + frames - 1) / frames, (columns + along - 1) / along, batch.N);
  }
  dim3 grid, block;
};

template <typename scalar>
struct Inputs {
  using real = acc_type<scalar>;
  const scalar *am, *lm;
  const real *am_max, *lm_max, *product, *lm_lse, *am_lse, *log_q;
};

// log sum_v exp(a(v) + b(v)) by a warp, without underflow.
template <typename scalar>
__device__ acc_type<scalar> exact_log_sum(const scalar* a, const scalar* b, int32_t V) {
  using real = acc_type<scalar>;
  ExpSum<real> sum;
  for (int32_t v = threadIdx.x % 32; v < V; v += 32) {
    const real x[1] = {static_cast<real>(a[v]) + static_cast<real>(b[v])};
    sum.add(x);
  }
  sum.template merge_lanes<32>();
  return sum.log_sum();
}

template <typename scalar>
__global__ void __launch_bounds__(kNodeThreads)
    simple_log_probs_kernel(SimpleBatch batch, SymbolTable symbols,
                            SmoothingScales<acc_type<scalar>> scales, Inputs<scalar> in,
                            acc_type<scalar>* __restrict__ px, acc_type<scalar>* __restrict__ py,
                            acc_type<scalar>* __restrict__ logz) {
  using real = acc_type<scalar>;
  const real none = minus_infinity<real>();
  const int32_t n = blockIdx.z, V = symbols.V, blank = symbols.blank;
  const int32_t u = blockIdx.y * blockDim.x + threadIdx.x;
  const int32_t first_frame = blockIdx.x * blockDim.y * kFramesEach + threadIdx.y;
  const int32_t frames = batch.frames(n), columns = batch.columns(n);
  // The threads of a warp share a frame, and all of them take part in the exact sums.
  const bool column_used = u < columns;
  const int64_t column = int64_t(n) * batch.width + u;
  const scalar* lm = in.lm + (column_used ? column : 0) * V;
  const int32_t y = column_used && u + 1 < columns ? symbols.symbol(n, u) : -1;
  real lm_x = 0, lm_y = 0, lm_max = 0, own_x = 0, own_y = 0, log_q_x = 0, log_q_y = 0;
  if (column_used) {
    lm_y = static_cast<real>(lm[blank]);
    lm_x = y >= 0 ? static_cast<real>(lm[y]) : real(0);
    lm_max = in.lm_max[column];
    if (scales.lm_only != 0) {
      own_x = scales.lm_only * (lm_x - in.lm_lse[column]);
      own_y = scales.lm_only * (lm_y - in.lm_lse[column]);
    }
    if (scales.am_only != 0) {
      log_q_x = y >= 0 ? in.log_q[y] : real(0);
      log_q_y = in.log_q[blank];
    }
  }
  for (int i = 0; i < kFramesEach; ++i) {
    const int32_t t = first_frame + i * blockDim.y;
    if (t >= batch.T) return;
    const int64_t frame = int64_t(n) * batch.T + t;
    const int64_t node = frame * batch.width + u;
    const bool valid = column_used && t < frames;
    const scalar* am = in.am + frame * V;
    const real product = valid ? in.product[frame * batch.product_width + u] : real(1);
    const bool safe = product >= kSafeProduct<real>;
    real z = 0;
    if (valid && safe) z = log_of(product) + in.am_max[frame] + lm_max;
    for (unsigned left = __ballot_sync(kAllLanes, !safe); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const int32_t u_source = u - threadIdx.x % 32 + source;
      const real exact = exact_log_sum(am, in.lm + (int64_t(n) * batch.width + u_source) * V, V);
      if (threadIdx.x % 32 == source) z = exact;
    }
    if (u >= batch.width) continue;
    real emit = none, stay = none;
    if (valid && z != none) {
      const real am_y = static_cast<real>(am[blank]);
      stay = own_y;
      if (scales.combined != 0) stay += scales.combined * (am_y + lm_y - z);
      if (scales.am_only != 0) stay += scales.am_only * (am_y + log_q_y - in.am_lse[frame]);
      if (y >= 0) {
        const real am_x = static_cast<real>(am[y]);
        emit = own_x;
        if (scales.combined != 0) emit += scales.combined * (am_x + lm_x - z);
        if (scales.am_only != 0) emit += scales.am_only * (am_x + log_q_x - in.am_lse[frame]);
      }
    }
    px[node] = emit;
    py[node] = stay;
    logz[node] = z;
  }
}

}  // namespace

void simple_log_probs(const Launcher& launch, const View& am, const View& lm,
                      const RowMaxima& maxima, const View& product, const Smoothing& smoothing,
                      const TargetsAndLengths& utterances, const Scales& scales,
                      const NodeScores& out) {
  if (out.px.numel() == 0) return;
  const SimpleBatch batch(out.px, product, utterances.logit_lengths, utterances.target_lengths);
  const SymbolTable symbols(utterances.targets, am.size(2), scales.blank);
  const NodeGrid nodes(batch, batch.width);
  dispatch_floating(am.scalar_type(), "simple_log_probs", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const Inputs<scalar> inputs{data_of<scalar>(am),
                                data_of<scalar>(lm),
                                data_of<real>(maxima.am_max),
                                data_of<real>(maxima.lm_max),
                                data_of<real>(product),
                                data_or_null<real>(smoothing.lm_lse),
                                data_or_null<real>(smoothing.am_lse),
                                data_or_null<real>(smoothing.log_q)};
    launch(simple_log_probs_kernel<scalar>, nodes.grid, nodes.block, 0, batch, symbols,
           SmoothingScales<real>(scales), inputs, mutable_data_of<real>(out.px),
           mutable_data_of<real>(out.py), mutable_data_of<real>(out.logz));
  });
}

namespace {

// Stores a weight in one part, or as high, high, low.
template <typename stored, typename real>
RNNT_DEVICE void store_weight(stored* frame, int32_t u, int32_t width, bool parts, real weight) {
  const stored high = static_cast<stored>(weight);
  frame[u] = high;
  if (!parts) return;
  frame[width + u] = high;
  frame[2 * width + u] = static_cast<stored>(weight - static_cast<real>(high));
}

template <typename real, typename stored>
__global__ void __launch_bounds__(kNodeThreads)
    simple_weights_kernel(SimpleBatch batch, real scale, real emit_factor, int32_t stored_width,
                          bool parts, const real* __restrict__ grad_loss,
                          const real* __restrict__ gx, const real* __restrict__ gy,
                          const real* __restrict__ product, stored* __restrict__ weights) {
  const int32_t n = blockIdx.z;
  const int32_t u = blockIdx.y * blockDim.x + threadIdx.x;
  const int32_t first_frame = blockIdx.x * blockDim.y * kFramesEach + threadIdx.y;
  if (u >= stored_width) return;
  const real factor = scale * grad_loss[n];
  const int32_t frames = batch.frames(n);
  const bool column_used = u < batch.columns(n);
#pragma unroll
  for (int i = 0; i < kFramesEach; ++i) {
    const int32_t t = first_frame + i * blockDim.y;
    if (t >= batch.T) return;
    const int64_t frame = int64_t(n) * batch.T + t, node = frame * batch.width + u;
    real weight = 0;
    if (column_used && t < frames) {
      const real leaving = emit_factor * gx[node] + gy[node];
      const real divisor = product[frame * batch.product_width + u];
      if (leaving != 0 && divisor >= kSafeProduct<real>) weight = leaving * factor / divisor;
    }
    store_weight(weights + frame * stored_width * (parts ? 3 : 1), u, stored_width, parts, weight);
  }
}

}  // namespace

void simple_weights(const Launcher& launch, const NodeUpstream& upstream, const View& product,
                    const View& logit_lengths, const View& target_lengths, double scale,
                    double fastemit_lambda, const View& weights) {
  if (upstream.gx.numel() == 0) return;
  const SimpleBatch batch(upstream.gx, product, logit_lengths, target_lengths);
  const int32_t stored_width = int32_t(weights.size(3));
  const NodeGrid nodes(batch, stored_width);
  dispatch_accumulator(product.scalar_type(), "simple_weights", [&](auto zero) {
    using real = decltype(zero);
    const auto run = [&](auto stored_zero) {
      using stored = decltype(stored_zero);
      launch(simple_weights_kernel<real, stored>, nodes.grid, nodes.block, 0, batch,
             static_cast<real>(scale), static_cast<real>(1 + fastemit_lambda), stored_width,
             weights.size(2) == 3, data_of<real>(upstream.grad_loss), data_of<real>(upstream.gx),
             data_of<real>(upstream.gy), data_of<real>(product), mutable_data_of<stored>(weights));
    };
    if constexpr (std::is_same_v<real, float>) {
      if (weights.scalar_type() == ScalarType::BFloat16) return run(BFloat16());
    }
    run(zero);
  });
}

PRUNED_RNNT_CUDA_OP(simple_log_probs)
PRUNED_RNNT_CUDA_OP(simple_weights)

}  // namespace pruned_rnnt::cuda
