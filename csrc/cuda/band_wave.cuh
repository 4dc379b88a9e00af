// The recursion over a band of up to 31 columns per frame, by one warp that steps along diagonals
// t + u, with one more to feed it and one to take away what it makes.
//
// Lane l of the walker has the columns u = l, l + 32, l + 64, ... one after the other: the band
// moves on and never back, so that it never needs two of them at a time. Then node (t-1,u) is the
// lane's own value of the step before, and node (t,u-1) the last value of its neighbour, as in a
// whole lattice. A lane whose column is outside the band at a step is given arcs of probability 0,
// which also clears what it had; at least one such step lies between two columns of a lane. With 32
// columns a lane's neighbour could already be a column ahead.
// Steps are T_n + U_n, whatever the width. The three warps go in periods of kBandChunk steps with a
// barrier between them: the feeder lays out the arcs of the steps to come, the walker does its
// steps, the storer takes the values of the steps before.
//
// Axes: T frames, S columns of the band; t and u count from the corner where the walk begins.
#pragma once

#include "cuda/band.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int32_t kNarrowColumns = 31;
constexpr int kBandChunk = 8;  // steps of a period, and frames that can begin in one
// Steps in shared memory: those stored, walked and laid out in a period, and as far ahead as a
// frame that begins in them reaches.
constexpr int kBandSteps = 3 * kBandChunk + 32;

// What the three warps of one direction share; the slot of step k is k % kBandSteps.
template <typename real>
struct BandMemory {
  struct alignas(2 * sizeof(real)) Arcs {
    real px, py;
  };
  Arcs arcs[kBandSteps][32];       // px and py of a step; then px is the value
  int32_t offset[kBandSteps][32];  // of the node from the utterance's first row, -1 for no node
};

template <typename real, Topology topology, bool backward>
class BandWalker {
 public:
  __device__ __forceinline__ explicit BandWalker(BandMemory<real>& memory)
      : memory_(memory), column_(threadIdx.x % 32 == 0) {}

  // Steps kBandChunk * chunk and on.
  __device__ __forceinline__ void walk(int32_t chunk) {
    if (chunk < 0) return;
    const int lane = threadIdx.x % 32;
    auto* const slots = &memory_.arcs[chunk * kBandChunk % kBandSteps];
    typename BandMemory<real>::Arcs arcs[kBandChunk];
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) arcs[i] = slots[i][lane];
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) {
      const Probability<real> neighbour = column_.sent().of_lane((lane + 31) % 32);
      slots[i][lane].px = column_.step(arcs[i].px, arcs[i].py, neighbour);
    }
    column_.normalise();
  }

 private:
  BandMemory<real>& memory_;
  Column<real, topology, backward> column_;
};

// Lays out arcs. Frames are taken in order, each in the period of its first step.
template <typename real, Topology topology, bool backward>
class BandFeeder {
 public:
  __device__ __forceinline__ BandFeeder(const BandLattice<real>& band, BandMemory<real>& memory)
      : band_(band), memory_(memory) {
    const unsigned reciprocal = (65536 + band.columns - 1) / band.columns;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      // The r-th node of this lane among kBandChunk frames; exact for numbers below 256.
      const unsigned number = r * 32 + threadIdx.x % 32;
      frame_[r] = number * reciprocal >> 16;
      column_[r] = number - frame_[r] * band.columns;
      slot_[r] = -1;
    }
  }

  // Lays out what was fetched for `chunk`, and fetches the next one.
  __device__ __forceinline__ void feed(int32_t chunk) {
    lay_out(chunk);
    fetch(chunk + 1);
  }

  // The first chunk to feed: a band may begin before the walk's first column.
  static constexpr int32_t first_chunk = -(32 / kBandChunk) - 1;

 private:
  static constexpr int kRounds = kBandChunk * 32 / 32;

  __device__ __forceinline__ void fetch(int32_t chunk) {
    const int lane = threadIdx.x % 32;
    const int32_t limit = (chunk + 1) * kBandChunk;
    // Lanes 0 .. kBandChunk-1 look at the next frames: where the band begins, as the walk sees it.
    int32_t first = 0;
    bool begins = false;
    if (lane < kBandChunk && taken_ + lane < band_.frames) {
      const int32_t start = band_.start[in_memory(taken_ + lane)];
      first = backward ? band_.symbols - start - band_.columns + 1 : start;
      begins = first + step_of_frame(taken_ + lane) < limit;
    }
    const int count = __popc(__ballot_sync(kAllLanes, begins));
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      slot_[r] = -1;
      if (r * 32 >= kBandChunk * band_.columns) continue;
      const int32_t u = __shfl_sync(kAllLanes, first, frame_[r] % 32) + column_[r];
      if (frame_[r] >= count || u < 0 || u > band_.symbols) continue;
      const int32_t f = taken_ + frame_[r], t = in_memory(f);
      const int32_t k = step_of_frame(f) + u;
      slot_[r] = k % kBandSteps * 32 + u % 32;
      const int32_t column = backward ? band_.columns - 1 - column_[r] : column_[r];
      offset_[r] = t * band_.columns + column;
      const bool emits = (backward ? u > 0 : u < band_.symbols) &&
                         (topology != Topology::kRna || t + 1 < band_.frames);
      px_[r] = emits ? band_.px[offset_[r]] : kLogZero<real>;
      py_[r] = band_.py[offset_[r]];
    }
    taken_ += count;
  }

  __device__ __forceinline__ void lay_out(int32_t chunk) const {
    const int lane = threadIdx.x % 32;
    // Frames that begin in this chunk reach 30 steps further. Slots up to there are cleared, as
    // many each time as a period has.
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) {
      const int32_t k = chunk * kBandChunk + 32 + i;
      if (k < 0) break;
      memory_.arcs[k % kBandSteps][lane] = {kLogZero<real>, kLogZero<real>};
      memory_.offset[k % kBandSteps][lane] = -1;
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (slot_[r] < 0) continue;
      real px = px_[r];
      if (band_.delay_penalty != 0) px += band_.delay(offset_[r] / band_.columns);
      (&memory_.arcs[0][0])[slot_[r]] = {to_log_zero(px), to_log_zero(py_[r])};
      (&memory_.offset[0][0])[slot_[r]] = offset_[r];
    }
    // The backward walk begins in the corner behind the last frame, whose step is free.
    if (backward && chunk == -1 && lane == 0) memory_.arcs[0][0].py = 0;
  }

  // The f-th frame of the walk in memory, and its first step less its column.
  __device__ __forceinline__ int32_t in_memory(int32_t f) const {
    return backward ? band_.frames - 1 - f : f;
  }
  __device__ __forceinline__ int32_t step_of_frame(int32_t f) const { return backward ? f + 1 : f; }

  const BandLattice<real>& band_;
  BandMemory<real>& memory_;
  int32_t taken_ = 0;  // frames so far
  // For each round: the node's place among the frames of a chunk, and what was fetched for it.
  int32_t frame_[kRounds], column_[kRounds];
  int32_t slot_[kRounds], offset_[kRounds];
  real px_[kRounds], py_[kRounds];
};

template <typename real>
__device__ __forceinline__ void store_band_chunk(const BandLattice<real>& band,
                                                 const BandMemory<real>& memory, int32_t chunk) {
  if (chunk < 0) return;
  const int lane = threadIdx.x % 32, slot = chunk * kBandChunk % kBandSteps;
#pragma unroll
  for (int i = 0; i < kBandChunk; ++i) {
    const int32_t offset = memory.offset[slot + i][lane];
    if (offset >= 0) band.values[offset] = from_log_zero(memory.arcs[slot + i][lane].px);
  }
}

// One direction of a band that never moves back. `part` is 0 for the walker, 1 for the feeder, 2
// for the storer; other warps only keep step. All threads of the block must call this, for bands of
// the same length; the backward walk ends with log P.
template <typename real, Topology topology, bool backward>
__device__ void walk_band_wave(const BandLattice<real>& band, BandMemory<real>& memory, int part,
                               real* total) {
  BandWalker<real, topology, backward> walker(memory);
  using Feeder = BandFeeder<real, topology, backward>;
  Feeder feeder(band, memory);
  const int32_t last_step = band.frames + band.symbols;
  const int32_t last_period = last_step / kBandChunk + 1;
  for (int32_t period = Feeder::first_chunk - 1; period <= last_period; ++period) {
    if (part == 0) {
      walker.walk(period);
    } else if (part == 1) {
      feeder.feed(period + 1);
    } else if (part == 2) {
      store_band_chunk(band, memory, period - 1);
    }
    __syncthreads();
  }
  const int lane = threadIdx.x % 32;
  if (backward && part == 0 && lane == band.symbols % 32) {
    *total = from_log_zero(memory.arcs[last_step % kBandSteps][lane].px);
  }
}

}  // namespace cuda
}  // namespace pruned_rnnt
