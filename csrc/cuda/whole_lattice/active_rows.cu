// The exact loss over its active rows: hidden rows, and gradient of the logits.
// Contracts: pruned_rnnt/ops/joiner/active_rows.py; picture: active_chunk.cuh.
//
// Axes: N batch, T frames, U symbols, W columns of a frame, D joiner dim, V vocabulary, R rows.
#include "contracts/joiner.h"
#include "cuda/joiner/hidden_row.cuh"
#include "cuda/joiner/joiner_slice.cuh"
#include "cuda/joiner/logits_gradient.cuh"
#include "cuda/whole_lattice/active_chunk.cuh"
#include "cuda/whole_lattice/active_ops.cuh"

namespace pruned_rnnt::cuda {
namespace {

using namespace active;

// A warp has four rows: with more, too few of them are on their way at a time.
uint32_t blocks_of(int64_t rows) { return uint32_t((rows + 4 * kWarps - 1) / (4 * kWarps)); }

// The rows of the chunk that a warp takes, about as many as every other warp: it prepares 32 at a
// time, one in each lane, and then computes one after the other.
struct WarpRows {
  RNNT_DEVICE explicit WarpRows(const ActiveChunk& chunk) {
    const int32_t rows = chunk.end() - chunk.begin(), warps = int32_t(gridDim.x) * kWarps;
    const int32_t each = (rows + warps - 1) / warps;
    begin = min(rows, (int32_t(blockIdx.x) * kWarps + int32_t(threadIdx.x / 32)) * each);
    end = min(rows, begin + each);
  }
  // The row of the lattice that this lane prepares, of those from `first` on.
  RNNT_DEVICE int32_t row_of_lane(const ActiveChunk& chunk, int32_t first) const {
    const int32_t place = chunk.begin() + min(first + int32_t(threadIdx.x % 32), end - 1);
    return chunk.listed == nullptr ? place : chunk.listed[place];
  }

  int32_t begin, end;
};

// Hidden rows are followed by 1 and zeros: the row of the output layer's bias.
template <Activation activation>
__global__ void __launch_bounds__(kThreads)
    active_joiner_rows_kernel(RowGeometry geometry, ActiveChunk chunk, int32_t D, int32_t pitch,
                              const PitchedInput<scalar> am, const PitchedInput<scalar> lm,
                              scalar* __restrict__ hidden) {
  const WarpRows rows(chunk);
  for (int32_t first = rows.begin; first < rows.end; first += 32) {
    const RowCursor node(geometry, rows.row_of_lane(chunk, first));
    const int count = min(32, rows.end - first);
    scalar* target = hidden + int64_t(first) * pitch;
    write_hidden_rows<activation, kWidth>(am, lm, am.row(node.n(), node.t()),
                                          lm.row(node.n(), node.u()), count, D, target, pitch);
    const int32_t vectors = (pitch - D) / kWidth;
    for (int32_t i = threadIdx.x % 32; i < count * vectors; i += 32) {
      const int32_t row = i / vectors, column = i - row * vectors;
      Vector<scalar, kWidth> value{};
      if (column == 0) value.x[0] = static_cast<scalar>(1.0f);
      store_vector<kWidth>(target + int64_t(row) * pitch + D + column * kWidth, value);
    }
  }
}

// Vectors of a row that a lane has; the lanes of a warp have a segment of the columns, which
// blockIdx.y numbers.
constexpr int kHeld = 2;
constexpr int32_t kSegment = kHeld * 32 * kWidth;

// The exceptions of the row of this lane, as far as they are in a segment: other segments may have
// been overwritten by their gradients.
RNNT_DEVICE KnownExceptions<real> exceptions_in_segment(const RowGradient<real>& row,
                                                        const scalar* logits, int32_t segment) {
  KnownExceptions<real> here{};
  if (!row.used) return here;
  if (uint32_t(row.target - segment) < kSegment) {
    here.target = row.at_target(static_cast<real>(logits[row.target]));
  }
  if (uint32_t(row.blank - segment) < kSegment) {
    here.blank = row.at_blank(static_cast<real>(logits[row.blank]));
  }
  return here;
}

// The gradient replaces the logits, and is summed over the rows of this block.
__global__ void __launch_bounds__(kThreads, 3)
    active_log_probs_backward_kernel(RowGeometry geometry, SymbolTable symbols, ActiveChunk chunk,
                                     GradientInputs<real> in, int32_t pitch,
                                     scalar* __restrict__ logits, real* __restrict__ sums) {
  if (chunk.begin() == chunk.end()) return;
  const int lane = threadIdx.x % 32;
  const int32_t segment = int32_t(blockIdx.y) * kSegment;
  const auto column = [&](int k) { return segment + (k * 32 + lane) * kWidth; };
  using Vectors = Vector<scalar, kWidth>[kHeld];
  const auto load = [&](int32_t place, Vectors& x) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      // Lanes without a column load another: a condition would move the elements one by one.
      const int32_t from = min(column(k), pitch - kWidth);
      x[k] = load_vector<kWidth>(logits + int64_t(place) * pitch + from);
    }
  };
  const WarpRows rows(chunk);
  real sum[kHeld][kWidth] = {};
  Vectors x, next = {};
  if (rows.begin < rows.end) load(rows.begin, next);
  for (int32_t first = rows.begin; first < rows.end; first += 32) {
    const int32_t row = rows.row_of_lane(chunk, first);
    const RowGradient<real> of_lane(in, row, RowCursor(geometry, row), symbols);
    const scalar* of_row = logits + int64_t(min(first + lane, rows.end - 1)) * pitch;
    const KnownExceptions<real> exceptions = exceptions_in_segment(of_lane, of_row, segment);
    const int count = min(32, rows.end - first);
    for (int i = 0; i < count; ++i) {
      const int32_t place = first + i;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) x[k] = next[k];
      // The next row is on its way while this one is computed.
      load(min(place + 1, rows.end - 1), next);
      const RowGradient<real> unit = of_lane.from_lane(i);
      const KnownExceptions<real> known = exceptions.from_lane(i);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (column(k) >= pitch) break;
        Vector<scalar, kWidth> result{};
        if (unit.used) {
          result = unit.plain() ? gradient_of<true>(unit, x[k], column(k), symbols.V, known)
                                : gradient_of<false>(unit, x[k], column(k), symbols.V, known);
        }
        real rounded[kWidth];
        unpack(result, rounded);
#pragma unroll
        for (int v = 0; v < kWidth; ++v) sum[k][v] += rounded[v];
        store_vector<kWidth>(logits + int64_t(place) * pitch + column(k), result);
      }
    }
  }
  __shared__ real of_warps[kWarps][kSegment];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      // A column of vectors after the other: no bank is met twice.
      of_warps[threadIdx.x / 32][(k * kWidth + v) * 32 + lane] = sum[k][v];
    }
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < kSegment; i += kThreads) {
    const int32_t k = i / (kWidth * 32), v = i / 32 % kWidth;
    const int32_t c = segment + (k * 32 + i % 32) * kWidth + v;
    if (c >= pitch) continue;
    real total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp][i];
    sums[int64_t(blockIdx.x) * pitch + c] += total;
  }
}

}  // namespace

void active_joiner_rows(const Launcher& launch, const View& am, const View& lm,
                        const LatticeRows& lattice, const ActiveLists& lists, int64_t k,
                        int64_t activation, const View& hidden) {
  for (const View* rows : {&am, &lm}) check_rows(*rows, row_pitch(*rows), "active_joiner_rows");
  check_rows(hidden, hidden.stride(0), "active_joiner_rows");
  const RowGeometry geometry(lattice, lm.size(1) - 1);
  const ActiveChunk chunk(lists, k);
  dispatch_activation(activation, [&](auto kind) {
    launch(active_joiner_rows_kernel<decltype(kind)::value>, blocks_of(hidden.size(0)), kThreads, 0,
           geometry, chunk, int32_t(am.size(2)), int32_t(hidden.stride(0)),
           PitchedInput<scalar>(am), PitchedInput<scalar>(lm), mutable_data_of<scalar>(hidden));
  });
}

void active_log_probs_backward(const Launcher& launch, const View& grad_loss,
                               const RowStatistics& statistics, const View& targets,
                               const LatticeRows& lattice, const ActiveLists& lists, int64_t k,
                               int64_t vocabulary, const GradientOptions& options,
                               const View& logits, const View& sums) {
  check_rows(logits, logits.stride(0), "active_log_probs_backward");
  const RowGeometry geometry(lattice, targets.size(1));
  const GradientInputs<real> in(grad_loss, statistics, options);
  const int32_t pitch = int32_t(logits.stride(0));
  STD_TORCH_CHECK(sums.size(1) == pitch, "active_log_probs_backward sums all columns of logits");
  launch(active_log_probs_backward_kernel,
         dim3(uint32_t(sums.size(0)), uint32_t((pitch + kSegment - 1) / kSegment)), kThreads, 0,
         geometry, SymbolTable(targets, vocabulary, options.blank), ActiveChunk(lists, k), in,
         pitch, mutable_data_of<scalar>(logits), mutable_data_of<real>(sums));
}

PRUNED_RNNT_CUDA_OP(active_joiner_rows)
PRUNED_RNNT_CUDA_OP(active_log_probs_backward)

}  // namespace pruned_rnnt::cuda
