// list_active_rows: the rows of a whole lattice whose occupancy matters, in order, and where their
// chunks begin. Contract and picture: pruned_rnnt/ops/joiner/active_rows.py.
//
//   launch 1  limits of frames and positions, a warp for each
//   launch 2  bits of active rows, and how many each block of rows has
//   launch 3  rows before each block, then places and list of its rows
//   launch 4  the beginnings of the chunks, a thread for each
//
// Axes: N batch, T frames, S columns, R rows, K chunks, G blocks of the rows of a chunk.
#include "contracts/joiner.h"
#include "cuda/common/arithmetic.cuh"
#include "cuda/whole_lattice/active_ops.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// The warps of a block have adjacent groups of 32 rows.
constexpr int kGroups = 16;
static_assert(kWarps * kGroups * 32 == kListedRows);
// As _LIMITS, _OF_LOSS and _ALWAYS of active_rows.py.
constexpr int kLimits = 16;
constexpr float kOfLoss = 0x1p-3f, kAlways = 0x1p-6f;

struct Occupancies {
  const float *emit, *blank;
  float emit_factor;

  RNNT_DEVICE float operator[](int64_t row) const {
    return fmaf(emit_factor, emit[row], blank[row]);
  }
};

// Of the T frames and then the S positions of each utterance.
struct Limits {
  float* data;
  const float* totals;  // log P
  int32_t T, S;
  float left_out;

  // The most that the rows left out may have of a frame or position of an utterance.
  RNNT_DEVICE float most(int32_t n, int32_t frames) const {
    return fminf(left_out, fmaxf(totals[n] * (-kOfLoss / float(frames)), kAlways * left_out));
  }

  RNNT_DEVICE float* of(int64_t n) const { return data + n * (T + S); }
  RNNT_DEVICE float of_node(const RowCursor& node) const {
    const float* const limits = of(node.n());
    return fminf(limits[node.t()], limits[T + node.u()]);
  }
};

__global__ void __launch_bounds__(kThreads)
    limits_kernel(RowGeometry geometry, Occupancies in, Limits limits) {
  const int64_t warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int32_t lines = limits.T + limits.S, n = int32_t(warp / lines);
  const int32_t line = int32_t(warp - int64_t(n) * lines);
  if (n >= geometry.N) return;
  const int32_t W = geometry.width_of(n), frames = geometry.frames_of(n);
  const bool is_frame = line < limits.T;
  if (is_frame ? line >= frames : line - limits.T >= W) return;
  const int64_t first = geometry.first_row_of(n) + (is_frame ? int64_t(line) * W : line - limits.T);
  const int32_t rows = is_frame ? W : frames, step = is_frame ? 1 : W;
  const float most = limits.most(n, frames);
  const float least = most / float(max(limits.T, limits.S));
  float lost[kLimits] = {};
  for (int32_t i = threadIdx.x % 32; i < rows; i += 32) {
    const float occupancy = in[first + int64_t(i) * step];
    float limit = limits.left_out;
#pragma unroll
    for (int k = 0; k < kLimits; ++k) {
      lost[k] += occupancy <= fmaxf(limit, least) ? occupancy : 0.0f;
      limit *= 0.5f;
    }
  }
  float largest = least, limit = limits.left_out;
#pragma unroll
  for (int k = 0; k < kLimits; ++k) {
    if (sum_lanes<32>(lost[k]) <= most) largest = fmaxf(largest, limit);
    limit *= 0.5f;
  }
  if (threadIdx.x % 32 == 0) limits.of(n)[line] = largest;
}

// Of each block of rows: a bit for each active row, and their number.
struct Found {
  int32_t* data;

  RNNT_DEVICE int32_t& count(int64_t block) const {
    return data[block * kListedWords + kListedWords - 1];
  }
  // The groups of this warp.
  RNNT_DEVICE int32_t* groups() const {
    return data + blockIdx.x * kListedWords + threadIdx.x / 32 * kGroups;
  }
};

RNNT_DEVICE int64_t first_of_warp() {
  return (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kGroups * 32;
}

// packed_rows: null, or how many rows there are, which may be fewer than R.
__global__ void __launch_bounds__(kThreads)
    find_active_kernel(RowGeometry geometry, Occupancies in, Limits limits, int64_t R,
                       const int64_t* packed_rows, Found found) {
  __shared__ int32_t warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t rows = packed_rows == nullptr ? R : min(R, *packed_rows);
  int64_t row = first_of_warp() + lane;
  RowCursor node(geometry, min(row, rows - 1));
  int32_t count = 0;
  for (int i = 0; i < kGroups; ++i) {
    const bool is_active = row < rows && node.valid() && in[row] > limits.of_node(node);
    const unsigned bits = __ballot_sync(kAllLanes, is_active);
    if (lane == 0) found.groups()[i] = int32_t(bits);
    count += __popc(bits);
    row += 32;
    if (row < rows) node.advance(32);
  }
  if (lane == 0) warps[warp] = count;
  __syncthreads();
  if (threadIdx.x > 0) return;
  int32_t total = 0;
  for (const int32_t of_warp : warps) total += of_warp;
  found.count(blockIdx.x) = total;
}

__global__ void __launch_bounds__(kThreads)
    list_active_kernel(int64_t R, Found found, int32_t* __restrict__ listed,
                       int32_t* __restrict__ places) {
  // Active rows before this block, in parts, and those of its warps.
  __shared__ int32_t before[kWarps], warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t earlier = 0;
  for (int32_t block = threadIdx.x; block < int32_t(blockIdx.x); block += kThreads) {
    earlier += found.count(block);
  }
  earlier = sum_lanes<32>(earlier);
  const int64_t first = first_of_warp();
  unsigned bits[kGroups];
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    // The last block may have nothing but the end of `places`.
    bits[i] = first + i * 32 < R ? unsigned(found.groups()[i]) : 0;
    count += __popc(bits[i]);
  }
  if (lane == 0) {
    before[warp] = earlier;
    warps[warp] = count;
  }
  __syncthreads();
  int32_t place = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) place += before[i] + (i < warp ? warps[i] : 0);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int64_t row = first + i * 32 + lane;
    if (row <= R) {
      const int32_t at = place + __popc(bits[i] & ((1u << lane) - 1));
      places[row] = at;
      if (((bits[i] >> lane) & 1) != 0) listed[at] = int32_t(row);
    }
    place += __popc(bits[i]);
  }
}

struct Chunks {
  int32_t *begins, *utterances, *frames, *block_ends;
  int32_t K, G;
  int64_t rows;  // of a chunk
};

// The place at which chunk k begins: at the first active row of the frame of row k * rows.
RNNT_DEVICE int32_t begin_of(const RowGeometry& geometry, const Chunks& chunks,
                             const int32_t* listed, const int32_t* places, int32_t total, int32_t k,
                             int32_t* utterance, int32_t* frame) {
  *utterance = geometry.N;
  *frame = 0;
  const int64_t wanted = k * chunks.rows;
  if (wanted >= total) return total;
  const int64_t row = listed[wanted];
  const RowCursor node(geometry, row);
  *utterance = node.n();
  *frame = node.t();
  return places[row - node.u()];
}

__global__ void chunk_begins_kernel(RowGeometry geometry, Chunks chunks,
                                    const int32_t* __restrict__ listed,
                                    const int32_t* __restrict__ places, int64_t R) {
  const int32_t k = int32_t(blockIdx.x * blockDim.x + threadIdx.x), total = places[R];
  if (k > chunks.K) return;
  int32_t utterance, frame;
  const int32_t begin = begin_of(geometry, chunks, listed, places, total, k, &utterance, &frame);
  chunks.begins[k] = begin;
  chunks.utterances[k] = utterance;
  chunks.frames[k] = frame;
  if (k == chunks.K) return;
  const int64_t size =
      begin_of(geometry, chunks, listed, places, total, k + 1, &utterance, &frame) - begin;
  for (int32_t g = 0; g < chunks.G; ++g) {
    chunks.block_ends[k * chunks.G + g] = int32_t(size * (g + 1) / chunks.G);
  }
}

}  // namespace

void list_active_rows(const Launcher& launch, const View& gx, const View& gy, const View& total,
                      const LatticeRows& lattice, double fastemit_lambda, double left_out,
                      int64_t chunk_rows, const View& limits, const View& found,
                      const ActiveLists& lists, const View& block_ends) {
  const int64_t R = gx.numel();
  const uint32_t blocks = uint32_t((R + kListedRows - 1) / kListedRows);
  const RowGeometry geometry(lattice);
  const Occupancies in{data_of<float>(gx), data_of<float>(gy), float(1 + fastemit_lambda)};
  const Limits of_lines{mutable_data_of<float>(limits), data_of<float>(total), int32_t(lattice.T),
                        int32_t(lattice.S), float(left_out)};
  launch(limits_kernel, uint32_t((geometry.N * (lattice.T + lattice.S) + kWarps - 1) / kWarps),
         kThreads, 0, geometry, in, of_lines);
  const Found bits{mutable_data_of<int32_t>(found)};
  launch(find_active_kernel, blocks, kThreads, 0, geometry, in, of_lines, R,
         lattice.row_splits.has_value()
             ? data_of<int64_t>(*lattice.row_splits) + lattice.row_splits->numel() - 1
             : nullptr,
         bits);
  // One more row: its place is the number of active rows.
  launch(list_active_kernel, uint32_t((R + kListedRows) / kListedRows), kThreads, 0, R, bits,
         mutable_data_of<int32_t>(lists.listed), mutable_data_of<int32_t>(lists.places));
  const Chunks chunks{mutable_data_of<int32_t>(lists.begins),
                      mutable_data_of<int32_t>(lists.utterances),
                      mutable_data_of<int32_t>(lists.frames),
                      mutable_data_of<int32_t>(block_ends),
                      int32_t(block_ends.size(0)),
                      int32_t(block_ends.size(1)),
                      chunk_rows};
  launch(chunk_begins_kernel, uint32_t(chunks.K / 32 + 1), 32, 0, geometry, chunks,
         data_of<int32_t>(lists.listed), data_of<int32_t>(lists.places), R);
}

PRUNED_RNNT_CUDA_OP(list_active_rows)

}  // namespace pruned_rnnt::cuda
