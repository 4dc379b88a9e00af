// joiner_rows_backward: the gradients of am and lm, sums over a chunk's rows. Contract:
// pruned_rnnt/ops/joiner/joiner_rows.py. Narrow bands are read once (joiner_band.cuh). Whole
// lattices and wide bands are read twice: for the sums over a frame's columns and over a column's
// frames.
//
// Axes: N batch, T frames, U symbols, D joiner dim, r rows of the chunk.
#include "contracts/rows.h"
#include "cuda/common/band_frames.cuh"
#include "cuda/common/ops.cuh"
#include "cuda/joiner/hidden_row.cuh"
#include "cuda/joiner/joiner_band.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Fewer blocks leave multiprocessors of a large device idle.
constexpr int64_t kFewBlocks = 128;

// Sizes of a backward pass. Its first blocks have a warp for each frame of the chunk and each piece
// of 32 vectors of D; then follows a block for each (n,u) and piece.
struct BackwardSizes : JoinerSizes {
  int64_t frame_tasks;  // every frame_rows-th row may begin a frame
  int64_t frame_blocks;
  int32_t frame_rows, pieces;
};

// d am of a frame: the sum over its columns, by a warp.
template <typename scalar, Activation activation, int width>
__device__ void frame_gradient(const RowGeometry& geometry, const BackwardSizes& sizes,
                               const scalar* grad, const scalar* hidden,
                               const FrameGradients<scalar>& grad_am) {
  const int64_t warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t task = warp / sizes.pieces;
  const int32_t piece = int32_t(warp - task * sizes.pieces), D = sizes.D;
  const int32_t d = (piece * 32 + threadIdx.x % 32) * width;
  if (task >= sizes.frame_tasks || d >= D) return;
  const int64_t row = task * sizes.frame_rows;
  const RowCursor cursor(geometry, sizes.row_begin + row);
  // Only the chunk's first row may be within a frame.
  if ((cursor.column() != 0 && row != 0) || cursor.t() >= sizes.frames) return;
  const int64_t frame = int64_t(cursor.n()) * sizes.frames + cursor.t();
  const int32_t rows = int32_t(min(int64_t(cursor.width() - cursor.column()), sizes.rows - row));
  acc_type<scalar> sum[width] = {};
  if (rows < cursor.width()) grad_am.template load<width>(frame * grad_am.pitch + d, sum);
  if (cursor.t() < cursor.frames()) {
    const int32_t begin = max(0, -cursor.u());
    const int32_t end = min(rows, cursor.symbols() + 1 - cursor.u());
#pragma unroll 4
    for (int32_t j = begin; j < end; ++j) {
      add_row<activation, width>(grad, hidden, (row + j) * D + d, sum);
    }
  }
  grad_am.template store<width>(frame * grad_am.pitch + d, sum);
}

// d lm of a symbol position: the sum over the chunk's frames that keep it. The warps of the block
// take these frames in turn, because a position may stay in the band for long.
template <typename scalar, Activation activation, int width>
__device__ void position_gradient(const RowGeometry& geometry, const BackwardSizes& sizes,
                                  const scalar* grad, const scalar* hidden,
                                  acc_type<scalar>* grad_lm) {
  using real = acc_type<scalar>;
  const int64_t task = blockIdx.x - sizes.frame_blocks;
  const int64_t position = task / sizes.pieces;
  const int32_t piece = int32_t(task - position * sizes.pieces), D = sizes.D;
  const int32_t n = int32_t(position / sizes.columns);
  const int32_t u = int32_t(position - int64_t(n) * sizes.columns);
  // Invalid lengths give no frames.
  const int32_t frames = max(0, min(geometry.frames_of(n), sizes.frames));
  const int64_t W = geometry.width_of(n), first = geometry.first_row_of(n);
  // Whole lattices may be cut before any column; chunks of bands have whole frames.
  const int64_t column = geometry.start == nullptr ? u : 0;
  const auto frames_before = [&](int64_t row) { return (row - first - column + W - 1) / W; };
  const int64_t chunk_first = max(int64_t(0), frames_before(sizes.row_begin));
  const int64_t chunk_end = frames_before(sizes.row_begin + sizes.rows);
  const int32_t t_begin = int32_t(min(chunk_first, int64_t(frames)));
  const int32_t t_end = int32_t(max(int64_t(0), min(chunk_end, int64_t(frames))));
  if (u > geometry.target_lengths[n] || t_begin >= t_end) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t d = (piece * 32 + lane) * width;
  const int64_t base = first - sizes.row_begin;
  real sum[width] = {};
  if (geometry.start == nullptr) {
    if (d < D) {
#pragma unroll 4
      for (int32_t t = t_begin + warp; t < t_end; t += kWarps) {
        add_row<activation, width>(grad, hidden, (base + t * W + u) * D + d, sum);
      }
    }
  } else {
    const int32_t* start = geometry.start + int64_t(n) * geometry.T;
    int seen = 0;
    for_frames_with(start, geometry.S, u, t_begin, t_end, [&](int32_t t) {
      if (seen++ % kWarps != warp || d >= D) return;
      add_row<activation, width>(grad, hidden, (base + t * W + u - start[t]) * D + d, sum);
    });
  }
  add_warp_sums<kWarps>(sum, piece, D, grad_lm + position * D);
}

template <typename scalar, Activation activation, int width>
__global__ void __launch_bounds__(kThreads)
    joiner_rows_backward_kernel(RowGeometry geometry, BackwardSizes sizes,
                                const scalar* __restrict__ grad, const scalar* __restrict__ hidden,
                                FrameGradients<scalar> grad_am,
                                acc_type<scalar>* __restrict__ grad_lm) {
  if (blockIdx.x < sizes.frame_blocks) {
    frame_gradient<scalar, activation, width>(geometry, sizes, grad, hidden, grad_am);
  } else {
    position_gradient<scalar, activation, width>(geometry, sizes, grad, hidden, grad_lm);
  }
}

// One pass over the rows of a band; false if shared memory has no room for the teams' sums.
template <typename scalar, int width>
bool run_band(const Launcher& launch, const RowGeometry& geometry, const JoinerSizes& sizes,
              int64_t activation, const scalar* grad, const scalar* hidden,
              const FrameGradients<scalar>& grad_am, acc_type<scalar>* grad_lm) {
  using real = acc_type<scalar>;
  const int32_t S = geometry.S;
  if (geometry.start == nullptr || S > kWidestTeamBand) return false;
  // A team reads 128 bytes of a row, or less if few blocks would not fill the device.
  const int64_t vectors = (sizes.D + width - 1) / width;
  const int64_t utterances = sizes.rows / std::max<int64_t>(int64_t{geometry.T} * S, 1) + 1;
  int lanes = std::min<int>(32, 128 / (width * sizeof(scalar)));
  const auto slices = [&] { return (vectors + lanes - 1) / lanes; };
  while (lanes > 1 && lanes / 2 >= vectors) lanes /= 2;
  if (lanes > 1 && utterances * slices() < kFewBlocks) lanes /= 2;
  const size_t bytes = SharedColumns<real>::bytes(S, lanes * width, kTeamThreads / lanes);
  if (bytes > static_cast<size_t>(launch.shared_bytes())) return false;
  const auto run = [&](auto most) {
    dispatch_activation(activation, [&](auto kind) {
      launch(
          joiner_band_backward_kernel<scalar, decltype(kind)::value, decltype(most)::value, width>,
          uint32_t(geometry.N * slices()), kTeamThreads, bytes, geometry, sizes, lanes,
          int32_t(slices()), grad, hidden, grad_am, grad_lm);
    });
  };
  if (S <= kUsualBand) {
    run(std::integral_constant<int, kUsualBand>());
  } else {
    run(std::integral_constant<int, kWidestTeamBand>());
  }
  return true;
}

template <typename scalar, int width>
void run_two_passes(const Launcher& launch, const RowGeometry& geometry,
                    const JoinerSizes& joiner_sizes, int64_t activation, const scalar* grad,
                    const scalar* hidden, const FrameGradients<scalar>& grad_am,
                    acc_type<scalar>* grad_lm) {
  BackwardSizes sizes{joiner_sizes};
  // Whole lattices: frames of packed ones differ in width, and chunks may begin or end within one.
  const bool whole_frames = geometry.row_splits == nullptr && sizes.row_begin % geometry.S == 0 &&
                            sizes.rows % geometry.S == 0;
  sizes.frame_rows = geometry.start != nullptr || whole_frames ? geometry.S : 1;
  sizes.frame_tasks = sizes.rows / sizes.frame_rows;
  sizes.pieces = (sizes.D / width + 31) / 32;
  sizes.frame_blocks = (sizes.frame_tasks * sizes.pieces + kWarps - 1) / kWarps;
  const int64_t blocks = sizes.frame_blocks + int64_t{geometry.N} * sizes.columns * sizes.pieces;
  dispatch_activation(activation, [&](auto kind) {
    launch(joiner_rows_backward_kernel<scalar, decltype(kind)::value, width>, uint32_t(blocks),
           kThreads, 0, geometry, sizes, grad, hidden, grad_am, grad_lm);
  });
}

}  // namespace

void joiner_rows_backward(const Launcher& launch, const View& grad_hidden, const View& hidden,
                          const LatticeRows& lattice, int64_t row_begin, int64_t activation,
                          const View& grad_am, const View& grad_lm) {
  const int64_t rows = hidden.size(0), D = hidden.size(1), columns = grad_lm.size(1);
  if (rows == 0 || D == 0) return;
  const RowGeometry geometry(lattice, columns - 1);
  const JoinerSizes sizes{row_begin, rows, int32_t(grad_am.size(1)), int32_t(columns), int32_t(D)};
  dispatch_floating(hidden.scalar_type(), "joiner_rows_backward", [&](auto zero) {
    using scalar = decltype(zero);
    const bool accumulated = grad_am.scalar_type() != hidden.scalar_type();
    const int64_t pitch = row_pitch(grad_am);
    const FrameGradients<scalar> frame_gradients{grad_am.data_ptr(), pitch, accumulated};
    using real = acc_type<scalar>;
    // Accumulators are stored in parts of 16 bytes.
    int widest = widest_vector<scalar>(grad_am.data_ptr(), pitch);
    if (accumulated) {
      const int part = widest_vector<real>(grad_am.data_ptr(), pitch);
      widest = part * sizeof(real) == 16 ? 16 / sizeof(scalar) : 1;
    }
    for (const View* rows : {&grad_hidden, &hidden}) {
      widest = std::min(widest, widest_vector<scalar>(rows->data_ptr(), D));
    }
    const scalar *grad = data_of<scalar>(grad_hidden), *value = data_of<scalar>(hidden);
    acc_type<scalar>* symbol_gradients = mutable_data_of<acc_type<scalar>>(grad_lm);
    dispatch_width<scalar>(widest, [&](auto width_constant) {
      constexpr int width = decltype(width_constant)::value;
      bool done = false;
      // Rows that cannot be read in whole vectors are rare.
      if constexpr (width * sizeof(scalar) == 16) {
        done = run_band<scalar, width>(launch, geometry, sizes, activation, grad, value,
                                       frame_gradients, symbol_gradients);
      }
      if (done) return;
      run_two_passes<scalar, width>(launch, geometry, sizes, activation, grad, value,
                                    frame_gradients, symbol_gradients);
    });
  });
}

PRUNED_RNNT_CUDA_OP(joiner_rows_backward)

}  // namespace pruned_rnnt::cuda
