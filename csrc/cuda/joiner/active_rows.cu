// The exact loss over its active rows: hidden rows, gradient of the logits, gradients of am and lm.
// Contracts: pruned_rnnt/ops/joiner/active_rows.py. A chunk is places begins[k] .. begins[k+1] - 1:
//
//   row of the lattice      0  1  2  3  4  5  6  7  8  9        a frame has 5 rows
//   active                  .  x  x  .  .  .  .  x  x  x
//   places (rows before)    0  0  1  2  2  2  2  2  3  4  5
//   listed                  1  2  7  8  9                       place 2 is row 7
//
// The number of active rows is known to the device only: grids cover the largest chunk, and warps
// behind its end have nothing to do. bfloat16, in vectors of 16 bytes.
//
// Axes: N batch, T frames, U symbols, W columns of a frame, D joiner dim, V vocabulary, R rows.
#include "cuda/common/ops.cuh"
#include "cuda/joiner/hidden_row.cuh"
#include "cuda/joiner/joiner_slice.cuh"
#include "cuda/joiner/logits_gradient.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {
namespace {

using scalar = BFloat16;
using real = acc_type<scalar>;
constexpr int kWidth = 16 / sizeof(scalar);
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Enough to fill a large device.
constexpr int64_t kMostBlocks = 1056;

// Chunk k of the active rows.
struct ActiveChunk {
  ActiveChunk(const View& listed, const View& places, const View& begins, const View& utterances,
              const View& frames, int64_t k)
      : listed(data_of<int32_t>(listed)),
        places(data_of<int32_t>(places)),
        begins(data_of<int32_t>(begins) + k),
        utterances(data_of<int32_t>(utterances) + k),
        frames(data_of<int32_t>(frames) + k) {}

  RNNT_DEVICE int32_t begin() const { return begins[0]; }
  RNNT_DEVICE int32_t end() const { return begins[1]; }

  const int32_t* __restrict__ listed, * __restrict__ places;
  // Of the first row of this chunk, and of the next one.
  const int32_t *begins, *utterances, *frames;
};

// A warp has four rows or more.
uint32_t blocks_of(int64_t rows) {
  return uint32_t(std::clamp<int64_t>(rows / (4 * kWarps), 1, kMostBlocks));
}

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
    return chunk.listed[chunk.begin() + min(first + int32_t(threadIdx.x % 32), end - 1)];
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
    for (int32_t i = threadIdx.x % 32; i < count * (pitch - D); i += 32) {
      const int32_t row = i / (pitch - D), column = i - row * (pitch - D);
      target[int64_t(row) * pitch + D + column] = static_cast<scalar>(column == 0 ? 1.0f : 0.0f);
    }
  }
}

// Vectors of a row that a lane has; the lanes of a warp have a segment of the columns, which
// blockIdx.y numbers.
constexpr int kHeld = 2;
constexpr int32_t kSegment = kHeld * 32 * kWidth;

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
      if (column(k) < pitch)
        x[k] = load_vector<kWidth>(logits + int64_t(place) * pitch + column(k));
    }
  };
  const WarpRows rows(chunk);
  real sum[kHeld][kWidth] = {};
  Vectors x, next = {};
  if (rows.begin < rows.end) load(rows.begin, next);
  for (int32_t first = rows.begin; first < rows.end; first += 32) {
    const int32_t row = rows.row_of_lane(chunk, first);
    const RowGradient<real> of_lane(in, row, RowCursor(geometry, row), symbols);
    const int count = min(32, rows.end - first);
    for (int i = 0; i < count; ++i) {
      const int32_t place = first + i;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) x[k] = next[k];
      // The next row is on its way while this one is computed.
      load(min(place + 1, rows.end - 1), next);
      const RowGradient<real> unit = of_lane.from_lane(i);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (column(k) >= pitch) break;
        Vector<scalar, kWidth> result{};
        if (unit.used) {
          result = unit.plain() ? gradient_of<true>(unit, x[k], column(k), symbols.V)
                                : gradient_of<false>(unit, x[k], column(k), symbols.V);
        }
#pragma unroll
        for (int v = 0; v < kWidth; ++v) sum[k][v] += static_cast<real>(result.x[v]);
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

// Sums of the gradient that reaches the joiner's input through rows of the chunk, for 8 elements of
// D from d on.
template <Activation activation>
struct RowSums {
  const scalar *grad, *hidden;
  int64_t grad_pitch, hidden_pitch;
  int32_t d, D;
  real sum[kWidth] = {};

  // Adds the rows place_of(i) for i = begin, begin + step, ..
  template <typename PlaceOf>
  RNNT_DEVICE void add(int32_t begin, int32_t end, int32_t step, PlaceOf&& place_of) {
    constexpr int ahead = 4;
    if (d >= D) return;
    for (int32_t i = begin; i < end; i += ahead * step) {
      Vector<scalar, kWidth> g[ahead], h[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        g[k] = h[k] = Vector<scalar, kWidth>{};
        if (i + k * step >= end) continue;
        const int64_t place = place_of(i + k * step);
        g[k] = load_vector<kWidth>(grad + place * grad_pitch + d);
        h[k] = load_vector<kWidth>(hidden + place * hidden_pitch + d);
      }
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
#pragma unroll
        for (int v = 0; v < kWidth; ++v) {
          sum[v] += through_activation<activation>(static_cast<real>(g[k].x[v]),
                                                   static_cast<real>(h[k].x[v]));
        }
      }
    }
  }
};

// Of the tasks of an utterance, the first have a warp for each frame and each piece of 32 vectors
// of D; then follows a block for each u and piece. Its rows are still in the cache when they are
// read again.
struct ActiveSizes {
  uint32_t blocks, frame_blocks;  // of an utterance
  int64_t grad_pitch, hidden_pitch;
  int32_t frames, columns, pieces, D;
};

template <Activation activation>
RNNT_DEVICE void active_frame(const RowGeometry& geometry, const ActiveChunk& chunk,
                              const ActiveSizes& sizes, int32_t n, uint32_t block,
                              const scalar* grad, const scalar* hidden,
                              const FrameGradients<scalar>& grad_am) {
  const int32_t warp = int32_t(block * kWarps + threadIdx.x / 32);
  const int32_t t = warp / sizes.pieces, piece = warp - t * sizes.pieces;
  const int32_t d = (piece * 32 + threadIdx.x % 32) * kWidth;
  if (t >= geometry.frames_of(n) || d >= sizes.D) return;
  const int64_t W = geometry.width_of(n), row = geometry.first_row_of(n) + t * W;
  const int32_t first = chunk.begin(), begin = chunk.places[row], end = chunk.places[row + W];
  if (begin < first || begin >= chunk.end() || begin == end) return;
  RowSums<activation> rows{grad, hidden, sizes.grad_pitch, sizes.hidden_pitch, d, sizes.D};
  rows.add(begin - first, end - first, 1, [](int32_t place) { return place; });
  grad_am.template store<kWidth>((int64_t(n) * sizes.frames + t) * grad_am.pitch + d, rows.sum);
}

template <Activation activation>
__device__ void active_position(const RowGeometry& geometry, const ActiveChunk& chunk,
                                const ActiveSizes& sizes, int32_t n, int32_t task,
                                const scalar* grad, const scalar* hidden, real* grad_lm) {
  const int32_t u = task / sizes.pieces, piece = task - u * sizes.pieces;
  if (u > geometry.target_lengths[n]) return;
  // The block's last task has read the shared memory.
  __syncthreads();
  const int32_t frames = geometry.frames_of(n);
  const int32_t t_begin = n == chunk.utterances[0] ? chunk.frames[0] : 0;
  const int32_t t_end = n == chunk.utterances[1] ? min(chunk.frames[1], frames) : frames;
  if (t_begin >= t_end) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t first = chunk.begin(), d = (piece * 32 + lane) * kWidth;
  const int64_t W = geometry.width_of(n), base = geometry.first_row_of(n) + u;
  RowSums<activation> rows{grad, hidden, sizes.grad_pitch, sizes.hidden_pitch, d, sizes.D};
  // Every thread looks for the place of one frame; the warps share those that were found.
  __shared__ int32_t found[kThreads], counts[kWarps];
  for (int32_t from = t_begin; from < t_end; from += kThreads) {
    const int32_t t = from + int32_t(threadIdx.x);
    int32_t place = 0;
    bool is_active = false;
    if (t < t_end) {
      const int64_t row = base + t * W;
      place = chunk.places[row];
      is_active = chunk.places[row + 1] != place;
    }
    const unsigned actives = __ballot_sync(kAllLanes, is_active);
    if (lane == 0) counts[warp] = __popc(actives);
    __syncthreads();
    int32_t before = 0, total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      before += i < warp ? counts[i] : 0;
      total += counts[i];
    }
    if (is_active) found[before + __popc(actives & ((1u << lane) - 1))] = place - first;
    __syncthreads();
    rows.add(warp, total, kWarps, [&](int32_t i) { return found[i]; });
    __syncthreads();
  }
  add_warp_sums<kWarps>(rows.sum, piece, sizes.D,
                        grad_lm + (int64_t(n) * sizes.columns + u) * sizes.D);
}

// Blocks take the tasks of the chunk's utterances in turn.
template <Activation activation>
__global__ void __launch_bounds__(kThreads, 3)
    active_joiner_backward_kernel(RowGeometry geometry, ActiveChunk chunk, ActiveSizes sizes,
                                  const scalar* __restrict__ grad,
                                  const scalar* __restrict__ hidden, FrameGradients<scalar> grad_am,
                                  real* __restrict__ grad_lm) {
  if (chunk.begin() == chunk.end()) return;
  const int32_t first = chunk.utterances[0], last = min(chunk.utterances[1], geometry.N - 1);
  const uint32_t tasks = uint32_t(last - first + 1) * sizes.blocks;
  for (uint32_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const uint32_t utterance = task / sizes.blocks, block = task - utterance * sizes.blocks;
    const int32_t n = first + int32_t(utterance);
    if (block < sizes.frame_blocks) {
      active_frame<activation>(geometry, chunk, sizes, n, block, grad, hidden, grad_am);
    } else {
      const int32_t position = int32_t(block - sizes.frame_blocks);
      active_position<activation>(geometry, chunk, sizes, n, position, grad, hidden, grad_lm);
    }
  }
}

// Rows, `pitch` elements apart, of 16-byte vectors of bfloat16.
void check_rows(const View& rows, int64_t pitch, const char* op) {
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::BFloat16 &&
                      widest_vector<scalar>(rows.data_ptr(), pitch) == kWidth,
                  op, " takes bfloat16 rows that begin at multiples of 16 bytes");
}

}  // namespace

void active_joiner_rows(const Launcher& launch, const View& am, const View& lm,
                        const View& logit_lengths, const View& target_lengths,
                        const OptionalView& start, const OptionalView& row_splits, int64_t T,
                        int64_t S, const View& listed, const View& places, const View& begins,
                        const View& utterances, const View& frames, int64_t k, int64_t activation,
                        const View& hidden) {
  for (const View* rows : {&am, &lm}) check_rows(*rows, row_pitch(*rows), "active_joiner_rows");
  check_rows(hidden, hidden.stride(0), "active_joiner_rows");
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             lm.size(1) - 1);
  const ActiveChunk chunk(listed, places, begins, utterances, frames, k);
  dispatch_activation(activation, [&](auto kind) {
    launch(active_joiner_rows_kernel<decltype(kind)::value>, blocks_of(hidden.size(0)), kThreads, 0,
           geometry, chunk, int32_t(am.size(2)), int32_t(hidden.stride(0)),
           PitchedInput<scalar>(am), PitchedInput<scalar>(lm), mutable_data_of<scalar>(hidden));
  });
}

void active_log_probs_backward(const Launcher& launch, const View& grad_loss, const View& lse,
                               const View& gx, const View& gy, const View& targets,
                               const View& logit_lengths, const View& target_lengths,
                               const OptionalView& start, const OptionalView& row_splits, int64_t T,
                               int64_t S, const View& listed, const View& places,
                               const View& begins, const View& utterances, const View& frames,
                               int64_t k, int64_t vocabulary, int64_t blank, int64_t mode,
                               double fastemit_lambda, double clamp, const View& logits,
                               const View& sums) {
  check_rows(logits, logits.stride(0), "active_log_probs_backward");
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S,
                             targets.size(1));
  const GradientInputs<real> in(grad_loss, lse, gx, gy, mode, fastemit_lambda, clamp);
  const int32_t pitch = int32_t(logits.stride(0));
  STD_TORCH_CHECK(sums.size(1) == pitch, "active_log_probs_backward sums all columns of logits");
  launch(active_log_probs_backward_kernel,
         dim3(uint32_t(sums.size(0)), uint32_t((pitch + kSegment - 1) / kSegment)), kThreads, 0,
         geometry, SymbolTable(targets, vocabulary, blank),
         ActiveChunk(listed, places, begins, utterances, frames, k), in, pitch,
         mutable_data_of<scalar>(logits), mutable_data_of<real>(sums));
}

void active_joiner_rows_backward(const Launcher& launch, const View& grad_hidden,
                                 const View& hidden, const View& logit_lengths,
                                 const View& target_lengths, const OptionalView& start,
                                 const OptionalView& row_splits, int64_t T, int64_t S,
                                 const View& listed, const View& places, const View& begins,
                                 const View& utterances, const View& frames, int64_t k,
                                 int64_t activation, const View& grad_am, const View& grad_lm) {
  for (const View* rows : {&grad_hidden, &hidden}) {
    check_rows(*rows, rows->stride(0), "active_joiner_rows_backward");
  }
  check_rows(grad_am, row_pitch(grad_am), "active_joiner_rows_backward");
  const int64_t D = grad_lm.size(2), columns = grad_lm.size(1);
  const RowGeometry geometry(logit_lengths, target_lengths, start, row_splits, T, S, columns - 1);
  ActiveSizes sizes{0,
                    0,
                    grad_hidden.stride(0),
                    hidden.stride(0),
                    int32_t(grad_am.size(1)),
                    int32_t(columns),
                    int32_t((D / kWidth + 31) / 32),
                    int32_t(D)};
  sizes.frame_blocks = uint32_t((sizes.frames * sizes.pieces + kWarps - 1) / kWarps);
  sizes.blocks = sizes.frame_blocks + uint32_t(columns * sizes.pieces);
  const uint32_t blocks =
      uint32_t(std::min<int64_t>(kMostBlocks, int64_t{geometry.N} * sizes.blocks));
  const FrameGradients<scalar> frame_gradients{grad_am.data_ptr(), row_pitch(grad_am), false};
  dispatch_activation(activation, [&](auto kind) {
    launch(active_joiner_backward_kernel<decltype(kind)::value>, blocks, kThreads, 0, geometry,
           ActiveChunk(listed, places, begins, utterances, frames, k), sizes,
           data_of<scalar>(grad_hidden), data_of<scalar>(hidden), frame_gradients,
           mutable_data_of<real>(grad_lm));
  });
}

PRUNED_RNNT_CUDA_OP(active_joiner_rows)
PRUNED_RNNT_CUDA_OP(active_log_probs_backward)
PRUNED_RNNT_CUDA_OP(active_joiner_rows_backward)

}  // namespace pruned_rnnt::cuda
