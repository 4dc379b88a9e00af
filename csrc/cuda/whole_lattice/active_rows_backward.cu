// The exact loss over its active rows: gradients of am and lm.
// Contracts: pruned_rnnt/ops/joiner/active_rows.py; picture: active_chunk.cuh.
//
// Axes: N batch, T frames, U symbols, W columns of a frame, D joiner dim, V vocabulary, R rows.
#include "contracts/joiner.h"
#include "cuda/joiner/hidden_row.cuh"
#include "cuda/joiner/joiner_slice.cuh"
#include "cuda/whole_lattice/active_chunk.cuh"
#include "cuda/whole_lattice/active_ops.cuh"

namespace pruned_rnnt::cuda {
namespace {

using namespace active;

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
    if (d >= D || begin >= end) return;
    const int32_t last = begin + (end - 1 - begin) / step * step;
    for (int32_t i = begin; i < end; i += ahead * step) {
      Vector<scalar, kWidth> g[ahead], h[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        // The last one again behind the end: a condition would move the elements one by one.
        const int64_t place = place_of(min(i + k * step, last));
        g[k] = load_vector<kWidth>(grad + place * grad_pitch + d);
        h[k] = load_vector<kWidth>(hidden + place * hidden_pitch + d);
      }
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        if (i + k * step < end) add_through<activation>(g[k], h[k], sum);
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
__global__ void __launch_bounds__(kThreads, 4)
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

}  // namespace

void active_joiner_rows_backward(const Launcher& launch, const View& grad_hidden,
                                 const View& hidden, const LatticeRows& lattice,
                                 const ActiveLists& lists, int64_t k, int64_t activation,
                                 const View& grad_am, const View& grad_lm) {
  for (const View* rows : {&grad_hidden, &hidden}) {
    check_rows(*rows, rows->stride(0), "active_joiner_rows_backward");
  }
  check_rows(grad_am, row_pitch(grad_am), "active_joiner_rows_backward");
  const int64_t D = grad_lm.size(2), columns = grad_lm.size(1);
  const RowGeometry geometry(lattice, columns - 1);
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
           ActiveChunk(lists, k), sizes, data_of<scalar>(grad_hidden), data_of<scalar>(hidden),
           frame_gradients, mutable_data_of<real>(grad_lm));
  });
}

PRUNED_RNNT_CUDA_OP(active_joiner_rows_backward)

}  // namespace pruned_rnnt::cuda
