// list_active_rows: the rows of a whole lattice whose occupancy matters, in order, and where their
// chunks begin. Contract and picture: pruned_rnnt/ops/joiner/active_rows.py.
//
//   launch 1  active rows of each block of rows
//   launch 2  rows before each block, then places and list of its rows
//   launch 3  the beginnings of the chunks, a thread for each
//
// Axes: N batch, R rows, K chunks, G blocks of the rows of a chunk.
#include "cuda/common/arithmetic.cuh"
#include "cuda/common/ops.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Rows of a block are ROWS_OF_BLOCK of active_rows.py; its warps have adjacent groups of 32 rows.
constexpr int kGroups = 16;
constexpr int64_t kBlockRows = kWarps * kGroups * 32;

struct Occupancies {
  const float *emit, *blank;
  float emit_factor, least;
  int64_t rows;
  const int64_t* packed_rows;  // there may be fewer than `rows`; null: not

  RNNT_DEVICE int64_t used_rows() const {
    return packed_rows == nullptr ? rows : min(rows, *packed_rows);
  }
  RNNT_DEVICE bool active(int64_t row, int64_t used) const {
    return row < used && fmaf(emit_factor, emit[row], blank[row]) > least;
  }
};

// Active rows of each group of 32 rows of this warp, a bit for each.
RNNT_DEVICE void active_groups(const Occupancies& in, int64_t first, unsigned (&bits)[kGroups]) {
  const int64_t used = in.used_rows(), row = first + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    bits[i] = __ballot_sync(kAllLanes, in.active(row + i * 32, used));
  }
}

RNNT_DEVICE int64_t first_of_warp() {
  return (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kGroups * 32;
}

RNNT_DEVICE int32_t count_bits(const unsigned (&bits)[kGroups]) {
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) count += __popc(bits[i]);
  return count;
}

__global__ void __launch_bounds__(kThreads)
    count_active_kernel(Occupancies in, int32_t* __restrict__ counts) {
  __shared__ int32_t warps[kWarps];
  unsigned bits[kGroups];
  active_groups(in, first_of_warp(), bits);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = count_bits(bits);
  __syncthreads();
  if (threadIdx.x > 0) return;
  int32_t total = 0;
  for (const int32_t count : warps) total += count;
  counts[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads)
    list_active_kernel(Occupancies in, const int32_t* __restrict__ counts,
                       int32_t* __restrict__ listed, int32_t* __restrict__ places) {
  // Active rows before this block, in parts, and those of its warps.
  __shared__ int32_t before[kWarps], warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t earlier = 0;
  for (int32_t block = threadIdx.x; block < int32_t(blockIdx.x); block += kThreads) {
    earlier += counts[block];
  }
  earlier = sum_lanes<32>(earlier);
  const int64_t first = first_of_warp();
  unsigned bits[kGroups];
  active_groups(in, first, bits);
  if (lane == 0) {
    before[warp] = earlier;
    warps[warp] = count_bits(bits);
  }
  __syncthreads();
  int32_t place = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) place += before[i] + (i < warp ? warps[i] : 0);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int64_t row = first + i * 32 + lane;
    if (row <= in.rows) {
      const int32_t at = place + __popc(bits[i] & ((1u << lane) - 1));
      places[row] = at;
      if (bits[i] >> lane & 1) listed[at] = int32_t(row);
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

void list_active_rows(const Launcher& launch, const View& gx, const View& gy,
                      const View& logit_lengths, const View& target_lengths,
                      const OptionalView& start, const OptionalView& row_splits, int64_t T,
                      int64_t S, double fastemit_lambda, double least, int64_t chunk_rows,
                      const View& counts, const View& listed, const View& places,
                      const View& begins, const View& utterances, const View& frames,
                      const View& block_ends) {
  const int64_t R = gx.numel();
  const uint32_t blocks = uint32_t((R + kBlockRows - 1) / kBlockRows);
  STD_TORCH_CHECK(gx.scalar_type() == ScalarType::Float && blocks == counts.numel(),
                  "list_active_rows takes float32 and a count for each ", kBlockRows, " rows");
  const Occupancies in{
      data_of<float>(gx),
      data_of<float>(gy),
      float(1 + fastemit_lambda),
      float(least),
      R,
      row_splits.has_value() ? data_of<int64_t>(*row_splits) + row_splits->numel() - 1 : nullptr};
  launch(count_active_kernel, blocks, kThreads, 0, in, mutable_data_of<int32_t>(counts));
  // One more row: its place is the number of active rows.
  launch(list_active_kernel, uint32_t((R + kBlockRows) / kBlockRows), kThreads, 0, in,
         data_of<int32_t>(counts), mutable_data_of<int32_t>(listed),
         mutable_data_of<int32_t>(places));
  const Chunks chunks{mutable_data_of<int32_t>(begins),
                      mutable_data_of<int32_t>(utterances),
                      mutable_data_of<int32_t>(frames),
                      mutable_data_of<int32_t>(block_ends),
                      int32_t(block_ends.size(0)),
                      int32_t(block_ends.size(1)),
                      chunk_rows};
  launch(chunk_begins_kernel, uint32_t(chunks.K / 32 + 1), 32, 0,
         RowGeometry(logit_lengths, target_lengths, start, row_splits, T, S), chunks,
         data_of<int32_t>(listed), data_of<int32_t>(places), R);
}

PRUNED_RNNT_CUDA_OP(list_active_rows)

}  // namespace pruned_rnnt::cuda
