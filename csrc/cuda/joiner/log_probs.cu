// log_probs: log-probabilities of blank and of the next symbol at every lattice node, from one
// reading of the logits, or of the two columns where these are log-probabilities already. Modes,
// formulas and layout: pruned_rnnt/ops/joiner/log_probs.py.
//
// Axes: R rows, V vocabulary.
#include "contracts/rows.h"
#include "cuda/common/arithmetic.cuh"
#include "cuda/common/ops.cuh"
#include "cuda/joiner/held_row.cuh"
#include "cuda/joiner/logit_rows.cuh"
#include "cuda/joiner/short_rows.cuh"
#include "row_geometry.h"
#include "symbol_table.h"

namespace pruned_rnnt::cuda {
namespace {

template <typename real>
struct Outputs {
  real *px, *py, *lse;
};

// The logits of the blank and of the next symbol.
template <typename real>
struct NodeLogits {
  real blank, target;
  bool emits;  // whether there is a target
};

template <typename scalar>
RNNT_DEVICE NodeLogits<acc_type<scalar>> logits_of_node(const RowCursor& node,
                                                        const SymbolTable& symbols,
                                                        const scalar* x) {
  const int32_t y = symbols.emitted_from(node);
  using real = acc_type<scalar>;
  return {static_cast<real>(x[symbols.blank]), y >= 0 ? static_cast<real>(x[y]) : real(0), y >= 0};
}

// Writes the outputs of a row; `normaliser` matters only if the row is used.
template <typename real>
RNNT_DEVICE void write_row(const Outputs<real>& out, int64_t row, bool used, LogitMode mode,
                           real normaliser, const NodeLogits<real>& logits) {
  real emit = minus_infinity<real>(), stay = minus_infinity<real>();
  if (used) {
    const bool dead = normaliser == minus_infinity<real>();
    if (mode == LogitMode::kHat) {
      stay = log_sigmoid(logits.blank);
    } else if (!dead) {
      stay = logits.blank - normaliser;
    }
    if (logits.emits && !dead) {
      emit = logits.target - normaliser;
      if (mode == LogitMode::kHat) emit += log_sigmoid(-logits.blank);
    }
  }
  out.px[row] = emit;
  out.py[row] = stay;
  out.lse[row] = used ? normaliser : real(0);
}

// Widens `width` logits from v on; those from V on and `skipped` become -inf.
template <int width, typename scalar, typename real>
RNNT_DEVICE void widen(const Vector<scalar, width>& loaded, int32_t v, int32_t V, int32_t skipped,
                       real* x) {
#pragma unroll
  for (int i = 0; i < width; ++i) x[i] = static_cast<real>(loaded.x[i]);
  if (v + width > V || uint32_t(skipped - v) < uint32_t(width)) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if (v + i >= V || v + i == skipped) x[i] = minus_infinity<real>();
    }
  }
}

// The log-sum-exp of V logits by the lanes of a group.
template <int lanes, int width, typename scalar>
RNNT_DEVICE acc_type<scalar> group_log_sum(const scalar* logits, int32_t V, int32_t skipped,
                                           int lane) {
  using real = acc_type<scalar>;
  constexpr int in_flight = kInFlight<width>;
  ExpSum<real> sum;
  for (int32_t begin = lane * width; begin < V; begin += lanes * width * in_flight) {
    Vector<scalar, width> loaded[in_flight];
    load_vectors<lanes>(logits, begin, V, loaded);
    real x[in_flight * width];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      widen<width>(loaded[k], begin + k * lanes * width, V, skipped, x + k * width);
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
                     Outputs<acc_type<scalar>> out) {
  using real = acc_type<scalar>;
  const int lane = threadIdx.x % lanes;
  int64_t row = range.first_row<lanes>();
  // A group without a row stays for the warp's shuffles.
  RowCursor node(geometry, range.begin + (row < range.count ? row : range.count - 1));
  for (int step = 0; step < range.rows_each; ++step) {
    const bool exists = row < range.count;
    const bool used = exists && node.valid();
    const scalar* x = logits + (exists ? row : 0) * stride;
    NodeLogits<real> of_node{};
    if (used) of_node = logits_of_node(node, symbols, x);
    real normaliser = 0;
    if (any_group_uses<lanes>(used)) {
      normaliser = group_log_sum<lanes, width>(x, used ? symbols.V : 0,
                                               mode == LogitMode::kHat ? symbols.blank : -1, lane);
    }
    if (exists && lane == 0) write_row(out, range.begin + row, used, mode, normaliser, of_node);
    row += range.groups_abreast<lanes>();
    if (row < range.count) node.advance(range.groups_abreast<lanes>());
  }
}

// A group of lanes holds a row in registers.
template <typename scalar, int held>
__global__ void __launch_bounds__(kHeldThreads, kHeldBlocks)
    held_log_probs_kernel(RowGeometry geometry, SymbolTable symbols, HeldRange range,
                          LogitMode mode, const scalar* __restrict__ logits, int64_t stride,
                          Outputs<float> out) {
  const int lane = threadIdx.x % kSmallGroup;
  const int64_t first = range.first_row(), row = first + lane;
  HeldRow<scalar, held> x(symbols.V, mode == LogitMode::kHat ? symbols.blank : -1, lane);
  const scalar* address = logits + first * stride;
  // On its way while the lanes find their nodes.
  if (first < range.count) x.load(address);
  const bool exists = lane < range.rows_each && row < range.count;
  const RowCursor node(geometry, range.begin + (exists ? row : range.count - 1));
  const bool used = exists && node.valid();
  NodeLogits<float> of_node{};
  if (used) of_node = logits_of_node(node, symbols, logits + row * stride);
  const uint32_t of_warp = __ballot_sync(kAllLanes, used);
  // Bit i: row i of the group.
  const uint32_t of_group = of_warp >> (threadIdx.x % 32 - lane) & ((1u << kSmallGroup) - 1);
  ExpTerms terms;
  float sum = 0;
  for (int i = 0; i < range.rows_each; ++i) {
    address += stride;
    const bool loads = of_group >> (i + 1) & 1;
    if ((of_warp >> i & kFirstLanes) == 0) {
      if (loads) x.load(address);
      continue;
    }
    const ExpTerms terms_of_row = x.terms();
    const float sum_of_row = x.sum_and_load(terms_of_row, address, loads);
    if (lane == i) {
      terms = terms_of_row;
      sum = sum_of_row;
    }
  }
  if (exists) write_row(out, range.begin + row, used, mode, terms.log_sum(sum), of_node);
}

// A thread computes a row.
template <typename scalar, int width>
__global__ void __launch_bounds__(kShortThreads)
    short_log_probs_kernel(RowGeometry geometry, SymbolTable symbols, int64_t row_begin,
                           int64_t rows, LogitMode mode, const scalar* __restrict__ logits,
                           Outputs<acc_type<scalar>> out) {
  using real = acc_type<scalar>;
  scalar* const shared = dynamic_shared_memory<scalar>();
  const int32_t V = symbols.V;
  const int64_t first_row = int64_t(blockIdx.x) * kShortThreads;
  const int64_t rows_here = min(int64_t(kShortThreads), rows - first_row);
  copy_block(logits + first_row * V, int32_t(rows_here * V), shared);
  const int64_t row = first_row + threadIdx.x;
  const bool exists = threadIdx.x < rows_here;
  const RowCursor node(geometry, row_begin + (exists ? row : first_row));
  __syncthreads();
  if (!exists) return;
  const bool used = node.valid();
  const scalar* x = shared + threadIdx.x * V;
  NodeLogits<real> of_node{};
  real normaliser = 0;
  if (used) {
    of_node = logits_of_node(node, symbols, x);
    const int32_t skipped = mode == LogitMode::kHat ? symbols.blank : -1;
    ExpSum<real> sum;
    for (int32_t v = 0; v < V; v += width) {
      real values[width];
      widen<width>(load_vector<width>(x + v), v, V, skipped, values);
#pragma unroll
      for (int i = 0; i < width; ++i) sum.maximum = fmax(sum.maximum, values[i]);
    }
    for (int32_t v = 0; v < V; v += width) {
      real values[width];
      widen<width>(load_vector<width>(x + v), v, V, skipped, values);
#pragma unroll
      for (int i = 0; i < width; ++i) sum.sum += exp_of(values[i] - sum.maximum);
    }
    normaliser = sum.log_sum();
  }
  write_row(out, row_begin + row, used, mode, normaliser, of_node);
}

// A thread takes the two log-probabilities of a row.
template <typename scalar>
__global__ void __launch_bounds__(kRowThreads)
    given_log_probs_kernel(RowGeometry geometry, SymbolTable symbols, int64_t row_begin,
                           int64_t rows, const scalar* __restrict__ given, int64_t stride,
                           Outputs<acc_type<scalar>> out) {
  using real = acc_type<scalar>;
  const int64_t row = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= rows) return;
  const RowCursor node(geometry, row_begin + row);
  const bool used = node.valid();
  NodeLogits<real> of_node{};
  if (used) of_node = logits_of_node(node, symbols, given + row * stride);
  write_row(out, row_begin + row, used, LogitMode::kLogProbs, real(0), of_node);
}

}  // namespace

void log_probs(const Launcher& launch, const View& logits, const View& targets,
               const LatticeRows& lattice, int64_t row_begin, int64_t blank, int64_t mode_number,
               const RowLogProbs& results) {
  const int64_t rows = logits.size(0), V = logits.size(1), stride = logits.stride(0);
  if (rows == 0) return;
  const RowGeometry geometry(lattice, targets.size(1));
  const SymbolTable symbols(targets, V, blank);
  const LogitMode mode = static_cast<LogitMode>(mode_number);
  dispatch_floating(logits.scalar_type(), "log_probs", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* data = data_of<scalar>(logits);
    const Outputs<real> out{mutable_data_of<real>(results.px), mutable_data_of<real>(results.py),
                            mutable_data_of<real>(results.lse)};
    if (mode == LogitMode::kLogProbs) {
      launch(given_log_probs_kernel<scalar>, uint32_t((rows + kRowThreads - 1) / kRowThreads),
             kRowThreads, 0, geometry, symbols, row_begin, rows, data, stride, out);
      return;
    }
    if (are_short_rows<scalar>(data, V, stride)) {
      dispatch_width<scalar>(short_row_width<scalar>(V), [&](auto width) {
        launch(short_log_probs_kernel<scalar, decltype(width)::value>, short_row_blocks(rows),
               kShortThreads, V * sizeof(scalar) * kShortThreads, geometry, symbols, row_begin,
               rows, mode, data, out);
      });
      return;
    }
    dispatch_width<scalar>(widest_vector<scalar>(data, stride), [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      dispatch_lanes(V, width, rows, [&](auto lanes_constant) {
        constexpr int lanes = decltype(lanes_constant)::value;
        if constexpr (kIsHeld<scalar, lanes, width>) {
          dispatch_held(V, [&](auto held) {
            const HeldRange range = HeldRange::of(row_begin, rows);
            launch(held_log_probs_kernel<scalar, decltype(held)::value>, range.blocks(),
                   kHeldThreads, 0, geometry, symbols, range, mode, data, stride, out);
          });
        } else {
          const RowRange range = RowRange::of<lanes>(row_begin, rows);
          launch(log_probs_kernel<scalar, lanes, width>, range.blocks<lanes>(), kRowThreads, 0,
                 geometry, symbols, range, mode, data, stride, out);
        }
      });
    });
  });
}

PRUNED_RNNT_CUDA_OP(log_probs)

}  // namespace pruned_rnnt::cuda
