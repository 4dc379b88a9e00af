// simple_backward: gradients of the trivial joiner's inputs. Formulas and contract:
// pruned_rnnt/ops/simple_log_probs.py.
//
// Axes: N batch, T frames, U symbols, V vocabulary. A row of am belongs to a frame and has a
// partner in every row of lm, and the other way round; both gradients of a row are made alike.
#include "cuda/arithmetic.cuh"
#include "cuda/simple_batch.cuh"
#include "cuda/symbol_table.cuh"
#include "cuda/vector_access.cuh"

namespace pruned_rnnt {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Frames of am that a block takes; columns of lm that a block takes.
constexpr int32_t kBlockFrames = 4 * kWarps;
constexpr int32_t kBlockColumns = 32;

template <typename real>
struct Occupancies {
  const real *gx, *gy, *product, *logz, *grad_loss;
  real emit_factor;

  __device__ __forceinline__ real emit(int64_t node) const { return emit_factor * gx[node]; }
  __device__ __forceinline__ real leaving(int64_t node) const { return emit(node) + gy[node]; }
  // Whether the product underflowed, so that this entry is not in the matrix products.
  __device__ __forceinline__ bool exact(int64_t node) const {
    return !(product[node] >= kSafeProduct<real>) && leaving(node) != 0;
  }
};

// One side (am or lm) of the joiner.
template <typename scalar, typename output>
struct Side {
  using real = acc_type<scalar>;
  const scalar* x;
  const real *x_exp, *x_sum;
  // Smoothing: the rows' own normaliser (null without) and the prior that was added (am only).
  const real *lse, *prior;
  real own_scale;
  output* gradient;
};

template <typename scalar, typename output>
struct Problem {
  using real = acc_type<scalar>;
  SimpleBatch batch;
  SymbolTable symbols;
  Occupancies<real> occupancies;
  real combined;
  Side<scalar, output> am, lm;
};

// The nodes of a row: first, first + step, ...; the partner of node k is row k of `partners`.
template <typename scalar>
struct RowNodes {
  int64_t first, step;
  int32_t count;
  const scalar* partners;
  bool has_exact;  // whether any of them is exact
};

// A row's gradient before the emitted symbols are subtracted.
template <typename scalar, typename output>
struct RowGradient {
  using real = acc_type<scalar>;
  const Side<scalar, output>& side;
  const Occupancies<real>& occupancies;
  const RowNodes<scalar>& nodes;
  int64_t row;
  int32_t V;
  real combined;  // times the incoming gradient
  real own;       // the weight of the row's own softmax

  __device__ __forceinline__ real at(int32_t v) const {
    const int64_t i = row * V + v;
    return with_rare_terms(v, side.x_exp[i] * side.x_sum[i]);
  }

  __device__ __forceinline__ real with_rare_terms(int32_t v, real value) const {
    if (own != 0) {
      real x = static_cast<real>(side.x[row * V + v]);
      if (side.prior != nullptr) x += side.prior[v];
      value += own * exp_of(x - side.lse[row]);
    }
    if (nodes.has_exact) value += exact_terms(v);
    return value;
  }

  __device__ __noinline__ real exact_terms(int32_t v) const {
    const real x = static_cast<real>(side.x[row * V + v]);
    real value = 0;
    for (int32_t k = 0; k < nodes.count; ++k) {
      const int64_t node = nodes.first + k * nodes.step;
      if (!occupancies.exact(node)) continue;
      const real partner = static_cast<real>(nodes.partners[static_cast<int64_t>(k) * V + v]);
      value += combined * occupancies.leaving(node) * exp_of(x + partner - occupancies.logz[node]);
    }
    return value;
  }
};

// Writes a row's gradient by a warp, all but the emitted symbols.
template <int width, typename scalar, typename output>
__device__ __forceinline__ void write_row(const RowGradient<scalar, output>& row) {
  using real = acc_type<scalar>;
  const int64_t offset = row.row * row.V;
#pragma unroll 2
  for (int32_t v = threadIdx.x % 32 * width; v < row.V; v += 32 * width) {
    const Vector<real, width> a = load_vector<width>(row.side.x_exp + offset + v);
    const Vector<real, width> b = load_vector<width>(row.side.x_sum + offset + v);
    Vector<output, width> result;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      result.x[i] = static_cast<output>(row.with_rare_terms(v + i, a.x[i] * b.x[i]));
    }
    store_vector<width>(row.side.gradient + offset + v, result);
  }
}

template <int width, typename scalar, typename output>
__device__ __forceinline__ void write_zeros(const Side<scalar, output>& side, int64_t row,
                                            int32_t V) {
  for (int32_t v = threadIdx.x % 32 * width; v < V; v += 32 * width) {
    store_zeros<width>(side.gradient + row * V + v);
  }
}

// Subtracts amount(i) from element at(i), for i = lane, lane + 32, .. < count, of a row that
// write_row has written (and a barrier passed); elements differ, negative ones are left out. Where
// the output is narrower than the accumulator, an element is made again, so that it is rounded
// once; where it is not, it may stand in the place of what it was made from.
template <typename scalar, typename output, typename At, typename Amount>
__device__ __forceinline__ void subtract(const RowGradient<scalar, output>& row, int32_t count,
                                         At&& at, Amount&& amount) {
  using real = acc_type<scalar>;
  // Elements on their way at a time: they do not depend on each other.
  constexpr int in_flight = 4;
  output* const gradient = row.side.gradient + row.row * row.V;
  for (int32_t begin = threadIdx.x % 32; begin < count; begin += 32 * in_flight) {
    int32_t v[in_flight];
    real value[in_flight];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      v[k] = begin + 32 * k < count ? at(begin + 32 * k) : -1;
      if (v[k] < 0) continue;
      if constexpr (std::is_same_v<output, real>) {
        value[k] = gradient[v[k]];
      } else {
        value[k] = row.at(v[k]);
      }
      value[k] -= amount(begin + 32 * k);
    }
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (v[k] >= 0) gradient[v[k]] = static_cast<output>(value[k]);
    }
  }
}

// Symbols of an utterance and, for each, the next position with the same symbol: so that every
// element of a row is written by one thread, in one order.
struct RepeatedSymbols {
  int32_t *symbol, *next;  // shared memory, U each; symbol is -1 where an earlier one has it

  __device__ void fill(const SymbolTable& table, int32_t n, int32_t count) {
    for (int32_t u = threadIdx.x; u < count; u += kThreads) symbol[u] = table.symbol(n, u);
    __syncthreads();
    for (int32_t u = threadIdx.x; u < count; u += kThreads) {
      int32_t later = u + 1;
      while (later < count && symbol[later] != symbol[u]) ++later;
      next[u] = symbol[u] >= 0 && later < count ? later : -1;
    }
    __syncthreads();
    // Now that all have been compared, later ones are marked by the one before.
    for (int32_t u = threadIdx.x; u < count; u += kThreads) {
      if (next[u] >= 0) symbol[next[u]] = -1;
    }
    __syncthreads();
  }
};

// kBlockFrames rows of d am.
template <int width, typename scalar, typename output>
__device__ void am_rows(const Problem<scalar, output>& problem, int32_t n, int32_t first_frame) {
  using real = acc_type<scalar>;
  const SimpleBatch& batch = problem.batch;
  const Occupancies<real>& occupancies = problem.occupancies;
  const int32_t V = problem.symbols.V, lane = threadIdx.x % 32;
  const int32_t frames = batch.frames(n), columns = batch.columns(n);
  const int32_t emitting = max(0, min(columns, problem.symbols.U));
  int32_t* memory = dynamic_shared_memory<int32_t>();
  RepeatedSymbols repeated{memory, memory + problem.symbols.U};
  repeated.fill(problem.symbols, n, emitting);
  const real upstream = occupancies.grad_loss[n];
  const real scale = (problem.combined + problem.am.own_scale) * upstream;

  const int32_t end = min(first_frame + kBlockFrames, batch.T);
  for (int32_t t = first_frame + threadIdx.x / 32; t < end; t += kWarps) {
    const int64_t row = static_cast<int64_t>(n) * batch.T + t;
    if (t >= frames) {
      write_zeros<width>(problem.am, row, V);
      continue;
    }
    const int64_t first = row * batch.width;
    real emits = 0, stays = 0;
    bool exact = false;
    for (int32_t u = lane; u < columns; u += 32) {
      emits += occupancies.emit(first + u);
      stays += occupancies.gy[first + u];
      exact |= occupancies.exact(first + u);
    }
    emits = sum_lanes<32>(emits);
    stays = sum_lanes<32>(stays);
    const RowNodes<scalar> nodes{first, 1, columns,
                                 problem.lm.x + static_cast<int64_t>(n) * batch.width * V,
                                 problem.combined != 0 && __any_sync(kAllLanes, exact)};
    const real own =
        problem.am.lse != nullptr ? problem.am.own_scale * upstream * (emits + stays) : real(0);
    const RowGradient<scalar, output> gradient{
        problem.am, occupancies, nodes, row, V, problem.combined * upstream, own};
    write_row<width>(gradient);
    __syncwarp();
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
}

// kBlockColumns rows of d lm.
template <int width, typename scalar, typename output>
__device__ void lm_rows(const Problem<scalar, output>& problem, int32_t n, int32_t first_column) {
  using real = acc_type<scalar>;
  const SimpleBatch& batch = problem.batch;
  const Occupancies<real>& occupancies = problem.occupancies;
  const int32_t V = problem.symbols.V, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t frames = batch.frames(n), columns = batch.columns(n);
  // Sums over frames, a lane for each column, a share of the frames for each warp.
  real(*emit_sums)[kBlockColumns] =
      reinterpret_cast<real(*)[kBlockColumns]>(dynamic_shared_memory<real>());
  real(*stay_sums)[kBlockColumns] = emit_sums + kWarps;
  __shared__ int has_exact[kBlockColumns];
  if (threadIdx.x < kBlockColumns) has_exact[threadIdx.x] = 0;
  __syncthreads();
  const int64_t base = static_cast<int64_t>(n) * batch.T * batch.width;
  {
    const int32_t u = first_column + lane;
    real emits = 0, stays = 0;
    bool exact = false;
    if (u < columns) {
#pragma unroll 4
      for (int32_t t = warp; t < frames; t += kWarps) {
        const int64_t node = base + static_cast<int64_t>(t) * batch.width + u;
        emits += occupancies.emit(node);
        stays += occupancies.gy[node];
        exact |= occupancies.exact(node);
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
    const int64_t row = static_cast<int64_t>(n) * batch.width + u;
    if (u >= columns) {
      write_zeros<width>(problem.lm, row, V);
      continue;
    }
    const real emits = sum_lanes<32>(lane < kWarps ? emit_sums[lane][column] : real(0));
    const real stays = sum_lanes<32>(lane < kWarps ? stay_sums[lane][column] : real(0));
    const RowNodes<scalar> nodes{base + u, batch.width, frames,
                                 problem.am.x + static_cast<int64_t>(n) * batch.T * V,
                                 problem.combined != 0 && has_exact[column] != 0};
    const real upstream = occupancies.grad_loss[n];
    const real own =
        problem.lm.lse != nullptr ? problem.lm.own_scale * upstream * (emits + stays) : real(0);
    const RowGradient<scalar, output> gradient{
        problem.lm, occupancies, nodes, row, V, problem.combined * upstream, own};
    write_row<width>(gradient);
    __syncwarp();
    const real scale = (problem.combined + problem.lm.own_scale) * upstream;
    const int32_t y = problem.symbols.symbol(n, u);
    subtract(
        gradient, 2, [&](int32_t i) { return i == 0 ? y : problem.symbols.blank; },
        [&](int32_t i) { return scale * (i == 0 ? emits : stays); });
  }
}

// Blocks for d am first, then those for d lm.
template <int width, typename scalar, typename output>
__global__ void __launch_bounds__(kThreads)
    simple_backward_kernel(Problem<scalar, output> problem, int32_t am_blocks, int32_t lm_blocks) {
  const int32_t n = blockIdx.y;
  const int32_t block = blockIdx.x;
  if (block < am_blocks) {
    am_rows<width>(problem, n, block * kBlockFrames);
  } else {
    lm_rows<width>(problem, n, (block - am_blocks) * kBlockColumns);
  }
}

void simple_backward(const Tensor& grad_loss, const Tensor& gx, const Tensor& gy, const Tensor& am,
                     const Tensor& lm, const Tensor& am_exp, const Tensor& lm_exp,
                     const Tensor& product, const Tensor& logz, const Tensor& am_sum,
                     const Tensor& lm_sum, const OptionalTensor& lm_lse,
                     const OptionalTensor& am_lse, const OptionalTensor& log_q,
                     const Tensor& targets, const Tensor& logit_lengths,
                     const Tensor& target_lengths, int64_t blank, double lm_only_scale,
                     double am_only_scale, double fastemit_lambda, const Tensor& grad_am,
                     const Tensor& grad_lm) {
  const SimpleBatch batch(product, logit_lengths, target_lengths);
  const SymbolTable symbols(targets, am.size(2), blank);
  if (product.numel() == 0) return;
  const Launcher launch(am);
  const int32_t am_blocks = (batch.T + kBlockFrames - 1) / kBlockFrames;
  const int32_t lm_blocks = (batch.width + kBlockColumns - 1) / kBlockColumns;
  const auto run = [&](auto zero, auto output_zero) {
    using scalar = decltype(zero);
    using output = decltype(output_zero);
    using real = acc_type<scalar>;
    const SimpleScales<real> scales(lm_only_scale, am_only_scale);
    const Problem<scalar, output> problem{
        batch,
        symbols,
        {data_of<real>(gx), data_of<real>(gy), data_of<real>(product), data_of<real>(logz),
         data_of<real>(grad_loss), static_cast<real>(1 + fastemit_lambda)},
        scales.combined,
        {data_of<scalar>(am), data_of<real>(am_exp), data_of<real>(am_sum),
         scales.am_only != 0 ? data_or_null<real>(am_lse) : nullptr, data_or_null<real>(log_q),
         scales.am_only, mutable_data_of<output>(grad_am)},
        {data_of<scalar>(lm), data_of<real>(lm_exp), data_of<real>(lm_sum),
         scales.lm_only != 0 ? data_or_null<real>(lm_lse) : nullptr, nullptr, scales.lm_only,
         mutable_data_of<output>(grad_lm)}};
    const size_t shared = std::max<size_t>(2 * kWarps * kBlockColumns * sizeof(real),
                                           2 * symbols.U * sizeof(int32_t));
    const int widest = std::min({widest_vector<real>(am_exp.data_ptr(), symbols.V),
                                 widest_vector<real>(am_sum.data_ptr(), symbols.V),
                                 widest_vector<real>(lm_exp.data_ptr(), symbols.V),
                                 widest_vector<real>(lm_sum.data_ptr(), symbols.V)});
    const dim3 grid(am_blocks + lm_blocks, batch.N);
    dispatch_width<real>(widest, [&](auto width) {
      launch(simple_backward_kernel<decltype(width)::value, scalar, output>, grid, kThreads, shared,
             problem, am_blocks, lm_blocks);
    });
  };
  dispatch_floating(am.scalar_type(), "simple_backward", [&](auto zero) {
    using scalar = decltype(zero);
    if constexpr (std::is_same_v<scalar, acc_type<scalar>>) {
      run(zero, zero);
    } else if (grad_am.scalar_type() == am.scalar_type() &&
               grad_lm.scalar_type() == am.scalar_type()) {
      run(zero, zero);
    } else {
      STD_TORCH_CHECK(grad_am.scalar_type() == grad_lm.scalar_type(),
                      "simple_backward: both gradients are of one dtype");
      run(zero, acc_type<scalar>());
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {
  m.impl("simple_backward", TORCH_BOX(&simple_backward));
}

}  // namespace cuda
}  // namespace pruned_rnnt
