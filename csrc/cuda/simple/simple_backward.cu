// simple_backward: gradients of the trivial joiner's inputs. Formulas and contract:
// pruned_rnnt/ops/simple/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary.
#include "contracts/simple.h"
#include "cuda/common/ops.cuh"
#include "cuda/simple/simple_rows.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Frames of am that a block takes; columns of lm that a block takes.
constexpr int32_t kBlockFrames = 4 * kWarps;
constexpr int32_t kBlockColumns = 32;

// Symbols of an utterance and, for each, the next position with the same symbol, so that one thread
// writes each element of a row, in a fixed order.
struct RepeatedSymbols {
  int32_t *symbol, *next;  // shared memory, U each; symbol is -1 if an earlier one has it

  __device__ void fill(const SymbolTable& table, int32_t n, int32_t count) {
    for (int32_t u = threadIdx.x; u < count; u += kThreads) symbol[u] = table.symbol(n, u);
    __syncthreads();
    for (int32_t u = threadIdx.x; u < count; u += kThreads) {
      int32_t later = u + 1;
      while (later < count && symbol[later] != symbol[u]) ++later;
      next[u] = symbol[u] >= 0 && later < count ? later : -1;
    }
    __syncthreads();
    // After all comparisons, each position marks the next one with its symbol.
    for (int32_t u = threadIdx.x; u < count; u += kThreads) {
      if (next[u] >= 0) symbol[next[u]] = -1;
    }
    __syncthreads();
  }
};

// Row t of d am; `emits` and `stays` are the sums over its nodes.
template <int width, bool has_exact, typename scalar>
RNNT_DEVICE void am_row(const SimpleProblem<scalar>& problem, RepeatedSymbols repeated, int32_t n,
                        int32_t t, int32_t emitting, acc_type<scalar> emits,
                        acc_type<scalar> stays) {
  using real = acc_type<scalar>;
  const SimpleBatch& batch = problem.batch;
  const Occupancies<real>& occupancies = problem.occupancies;
  const int32_t V = problem.symbols.V;
  const int64_t frame = int64_t(n) * batch.T + t, first = frame * batch.width;
  const RowNodes<scalar> nodes{frame, -1, batch.columns(n),
                               problem.lm.x + int64_t(n) * batch.width * V};
  const RowGradient<scalar, has_exact> gradient(problem, problem.am, nodes, n, t, emits + stays);
  write_row<width>(gradient);
  __syncwarp();
  const real scale = (problem.combined + problem.am.own_scale) * occupancies.grad_loss[n];
  // The blank comes after the symbols.
  const auto element = [&](int32_t i) {
    return i < emitting ? repeated.symbol[i] : problem.symbols.blank;
  };
  subtract(gradient, emitting + 1, element, [&](int32_t i) {
    if (i == emitting) return scale * stays;
    real sum = 0;
    for (int32_t same = i; same >= 0; same = repeated.next[same]) {
      sum += occupancies.emit(first + same);
    }
    return scale * sum;
  });
}

template <typename scalar>
__device__ __noinline__ void exact_am_row(const SimpleProblem<scalar>& problem,
                                          RepeatedSymbols repeated, int32_t n, int32_t t,
                                          int32_t emitting, acc_type<scalar> emits,
                                          acc_type<scalar> stays) {
  am_row<1, true>(problem, repeated, n, t, emitting, emits, stays);
}

// kBlockFrames rows of d am.
template <int width, typename scalar>
__device__ void am_rows(const SimpleProblem<scalar>& problem, int32_t n, int32_t first_frame) {
  using real = acc_type<scalar>;
  const SimpleBatch& batch = problem.batch;
  const Occupancies<real>& occupancies = problem.occupancies;
  const int32_t lane = threadIdx.x % 32;
  const int32_t frames = batch.frames(n), columns = batch.columns(n);
  const int32_t emitting = max(0, min(columns, problem.symbols.U));
  int32_t* memory = dynamic_shared_memory<int32_t>();
  RepeatedSymbols repeated{memory, memory + problem.symbols.U};
  if (first_frame < frames) repeated.fill(problem.symbols, n, emitting);

  const int32_t end = min(first_frame + kBlockFrames, batch.T);
  for (int32_t t = first_frame + threadIdx.x / 32; t < end; t += kWarps) {
    const int64_t row = int64_t(n) * batch.T + t;
    if (t >= frames) {
      write_zeros<width>(problem.am.gradient + row * problem.am.pitch, problem.am.pitch);
      continue;
    }
    real emits = 0, stays = 0;
    bool exact = false;
#pragma unroll 4
    for (int32_t u = lane; u < columns; u += 32) {
      emits += occupancies.emit(row * batch.width + u);
      stays += occupancies.blank_occupancy[row * batch.width + u];
      exact |= occupancies.exact(row, u);
    }
    emits = sum_lanes<32>(emits);
    stays = sum_lanes<32>(stays);
    if (problem.combined != 0 && __any_sync(kAllLanes, exact)) {
      exact_am_row(problem, repeated, n, t, emitting, emits, stays);
    } else {
      am_row<width, false>(problem, repeated, n, t, emitting, emits, stays);
    }
  }
}

// Row u of d lm; `emits` and `stays` are the sums over its nodes.
template <int width, bool has_exact, typename scalar>
RNNT_DEVICE void lm_row(const SimpleProblem<scalar>& problem, int32_t n, int32_t u,
                        acc_type<scalar> emits, acc_type<scalar> stays) {
  using real = acc_type<scalar>;
  const SimpleBatch& batch = problem.batch;
  const int64_t frame = int64_t(n) * batch.T;
  const RowNodes<scalar> nodes{frame, u, batch.frames(n), problem.am.x + frame * problem.symbols.V};
  const RowGradient<scalar, has_exact> gradient(problem, problem.lm, nodes, n, u, emits + stays);
  write_row<width>(gradient);
  __syncwarp();
  const real scale = (problem.combined + problem.lm.own_scale) * problem.occupancies.grad_loss[n];
  const int32_t y = problem.symbols.symbol(n, u);
  subtract(
      gradient, 2, [&](int32_t i) { return i == 0 ? y : problem.symbols.blank; },
      [&](int32_t i) { return scale * (i == 0 ? emits : stays); });
}

template <typename scalar>
__device__ __noinline__ void exact_lm_row(const SimpleProblem<scalar>& problem, int32_t n,
                                          int32_t u, acc_type<scalar> emits,
                                          acc_type<scalar> stays) {
  lm_row<1, true>(problem, n, u, emits, stays);
}

// kBlockColumns rows of d lm.
template <int width, typename scalar>
__device__ void lm_rows(const SimpleProblem<scalar>& problem, int32_t n, int32_t first_column) {
  using real = acc_type<scalar>;
  const SimpleBatch& batch = problem.batch;
  const Occupancies<real>& occupancies = problem.occupancies;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t frames = batch.frames(n), columns = batch.columns(n);
  // Sums over frames, a lane for each column, a share of the frames for each warp.
  real(*emit_sums)[kBlockColumns] =
      reinterpret_cast<real(*)[kBlockColumns]>(dynamic_shared_memory<real>());
  real(*stay_sums)[kBlockColumns] = emit_sums + kWarps;
  __shared__ int has_exact[kBlockColumns];
  if (threadIdx.x < kBlockColumns) has_exact[threadIdx.x] = 0;
  __syncthreads();
  const int64_t first_frame = int64_t(n) * batch.T;
  {
    const int32_t u = first_column + lane;
    real emits = 0, stays = 0;
    bool exact = false;
    if (u < columns) {
#pragma unroll 4
      for (int32_t t = warp; t < frames; t += kWarps) {
        const int64_t node = (first_frame + t) * batch.width + u;
        emits += occupancies.emit(node);
        stays += occupancies.blank_occupancy[node];
        exact |= occupancies.exact(first_frame + t, u);
      }
    }
    emit_sums[warp][lane] = emits;
    stay_sums[warp][lane] = stays;
    if (exact) has_exact[lane] = 1;
  }
  __syncthreads();
  for (int32_t column = warp; column < kBlockColumns; column += kWarps) {
    const int32_t u = first_column + column;
    if (u >= batch.width) return;
    if (u >= columns) {
      const int64_t row = int64_t(n) * batch.width + u;
      write_zeros<width>(problem.lm.gradient + row * problem.lm.pitch, problem.lm.pitch);
      continue;
    }
    const real emits = sum_lanes<32>(lane < kWarps ? emit_sums[lane][column] : real(0));
    const real stays = sum_lanes<32>(lane < kWarps ? stay_sums[lane][column] : real(0));
    if (problem.combined != 0 && has_exact[column] != 0) {
      exact_lm_row(problem, n, u, emits, stays);
    } else {
      lm_row<width, false>(problem, n, u, emits, stays);
    }
  }
}

// Blocks for d am first, then those for d lm.
template <int width, typename scalar>
__global__ void __launch_bounds__(kThreads, 4)
    simple_backward_kernel(const __grid_constant__ SimpleProblem<scalar> problem,
                           int32_t am_blocks) {
  const int32_t n = blockIdx.y, block = blockIdx.x;
  if (block < am_blocks) {
    am_rows<width>(problem, n, block * kBlockFrames);
  } else {
    lm_rows<width>(problem, n, (block - am_blocks) * kBlockColumns);
  }
}

}  // namespace

void simple_backward(const Launcher& launch, const NodeUpstream& upstream, const View& am,
                     const View& lm, const RowMaxima& maxima, const Products& products,
                     const Smoothing& smoothing, const TargetsAndLengths& utterances,
                     const Scales& given_scales, double fastemit_lambda, const View& grad_am,
                     const View& grad_lm) {
  const SimpleBatch batch(upstream.gx, products.product, utterances.logit_lengths,
                          utterances.target_lengths);
  const SymbolTable symbols(utterances.targets, am.size(2), given_scales.blank);
  if (upstream.gx.numel() == 0) return;
  const int32_t am_blocks = (batch.T + kBlockFrames - 1) / kBlockFrames;
  const int32_t lm_blocks = (batch.width + kBlockColumns - 1) / kBlockColumns;
  dispatch_floating(am.scalar_type(), "simple_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const SmoothingScales<real> scales(given_scales);
    int widest_rows = 16 / sizeof(scalar);
    const auto side = [&](const View& x, const View& row_max, const View& x_sum,
                          const OptionalView& lse, const OptionalView& prior, real own_scale,
                          const View& gradient) {
      const int64_t sum_pitch = x_sum.size(2);
      const int widest_sums = widest_vector<real>(x_sum.data_ptr(), sum_pitch);
      widest_rows = std::min({widest_rows, widest_vector<scalar>(x.data_ptr(), symbols.V),
                              widest_vector<scalar>(gradient.data_ptr(), row_pitch(gradient))});
      // Read in parts of 16 bytes.
      if (widest_sums < std::min<int>(widest_rows, 16 / sizeof(real))) widest_rows = 1;
      return Side<scalar>{data_of<scalar>(x),
                          data_of<real>(row_max),
                          data_of<real>(x_sum),
                          own_scale != 0 ? data_or_null<real>(lse) : nullptr,
                          data_or_null<real>(prior),
                          own_scale,
                          mutable_data_of<scalar>(gradient),
                          x.size(1),
                          x_sum.size(1) * sum_pitch,
                          sum_pitch,
                          row_pitch(gradient)};
    };
    const SimpleProblem<scalar> problem{
        batch,
        symbols,
        {data_of<real>(upstream.gx), data_of<real>(upstream.gy), data_of<real>(products.product),
         data_of<real>(products.logz), data_of<real>(upstream.grad_loss),
         static_cast<real>(1 + fastemit_lambda), batch.width, batch.product_width},
        scales.combined,
        side(am, maxima.am_max, products.am_sum, smoothing.am_lse, smoothing.log_q, scales.am_only,
             grad_am),
        side(lm, maxima.lm_max, products.lm_sum, smoothing.lm_lse, std::nullopt, scales.lm_only,
             grad_lm)};
    const size_t shared = std::max<size_t>(2 * kWarps * kBlockColumns * sizeof(real),
                                           2 * symbols.U * sizeof(int32_t));
    STD_TORCH_CHECK(shared <= size_t(launch.shared_bytes()), "simple_backward: ", symbols.U,
                    " symbols are too many for this device");
    const dim3 grid(am_blocks + lm_blocks, batch.N);
    dispatch_width<scalar>(widest_rows, [&](auto width) {
      launch(simple_backward_kernel<decltype(width)::value, scalar>, grid, kThreads, shared,
             problem, am_blocks);
    });
  });
}

PRUNED_RNNT_CUDA_OP(simple_backward)

}  // namespace pruned_rnnt::cuda
