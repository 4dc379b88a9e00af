// The recursion over a band of up to 31 columns per frame, by one warp that steps along diagonals
// t + u, with two more to feed it and to take away what it makes.
//
// Lane l of the walker has the columns u = l, l + 32, l + 64, ... one after the other: the band
// moves on and never back, so that it never needs two of them at a time. Then node (t-1,u) is the
// lane's own value of the step before, and node (t,u-1) the last value of its neighbour, as in a
// whole lattice. A lane whose column is outside the band at a step is given arcs of probability 0,
// which also clears what it had; at least one such step lies between two columns of a lane.
// Steps are T_n + U_n, whatever the width; with 32 columns a lane's neighbour could already be a
// column ahead.
//
// Axes: T frames, S columns of the band; t and u count from the corner where the walk begins.
#pragma once

#include "cuda/band.cuh"
#include "cuda/stripe_counters.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int32_t kNarrowColumns = 31;
constexpr int kBandChunk = 8;  // steps between two looks at the others' counters

// What the three warps of one direction share. Slot of step k: k % steps.
template <typename real>
struct BandMemory {
  static constexpr int steps = sizeof(real) == 4 ? 64 : 32;
  struct alignas(2 * sizeof(real)) Arcs {
    real px, py;
  };
  Arcs arcs[steps][32];       // px and py of a step; then px is the value
  int32_t offset[steps][32];  // of the node from the utterance's first row, -1 where there is none
  int32_t filled, done, stored;

  __device__ __forceinline__ void clear_counters() { filled = done = stored = 0; }
};

// The walker. Returns in all lanes their values of the last step.
template <typename real, Topology topology, bool backward>
__device__ real walk_band_wave(int32_t steps, BandMemory<real>& memory) {
  const int lane = threadIdx.x % 32;
  Column<real, topology, backward> column(lane == 0);
  int32_t filled = 0;
  real last = kLogZero<real>;
  for (int32_t k = 0; k < steps; k += kBandChunk) {
    if (filled < k + kBandChunk) filled = wait_for(memory.filled, k + kBandChunk);
    auto* const slots = &memory.arcs[k % BandMemory<real>::steps];
    typename BandMemory<real>::Arcs arcs[kBandChunk];
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) arcs[i] = slots[i][lane];
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) {
      const real neighbour = __shfl_sync(kAllLanes, column.sent(), (lane + 31) % 32);
      const real value = column.step(arcs[i].px, arcs[i].py, neighbour);
      slots[i][lane].px = value;
      if (k + i == steps - 1) last = value;
    }
    publish(memory.done, k + kBandChunk);
  }
  return last;
}

// Finds the nodes of a lane step by step, and fetches their arcs.
template <typename real, Topology topology, bool backward>
class BandFeeder {
 public:
  __device__ __forceinline__ BandFeeder(const BandLattice<real>& band, BandMemory<real>& memory)
      : band_(band), memory_(memory), u_(threadIdx.x % 32) {}

  __device__ void run(int32_t steps) {
    Chunk chunks[2];
    fetch(0, chunks[0]);
    for (int32_t k = 0; k < steps; k += 2 * kBandChunk) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t begin = k + half * kBandChunk;
        fetch(begin + kBandChunk, chunks[1 - half]);
        wait_for(memory_.stored, begin + kBandChunk - BandMemory<real>::steps);
        fill(begin, chunks[half]);
        publish(memory_.filled, begin + kBandChunk);
      }
    }
  }

 private:
  struct Chunk {
    real px[kBandChunk], py[kBandChunk];
    int32_t offset[kBandChunk];
  };
  // Offsets of steps without a node, and of the node after the last frame, whose step is free.
  static constexpr int32_t kNone = -1, kEnd = -2;

  // The node of this lane at step k; to be called for all steps in order.
  __device__ __forceinline__ int32_t find(int32_t k) {
    int32_t t = k - u_;
    if (backward) {
      // The walk begins in the corner (frames, symbols), which no band need contain.
      if (t == 0) return u_ == 0 ? kEnd : kNone;
      --t;
    }
    if (t < 0) return kNone;
    bool left = t >= band_.frames;
    if (!left) {
      const int32_t frame = backward ? band_.frames - 1 - t : t;
      const int32_t first = band_.start[frame];
      const int32_t u = backward ? band_.symbols - u_ : u_;
      const int32_t column = u - first;
      left = backward ? column >= band_.columns : column < 0;
      if (column >= 0 && column < band_.columns && u >= 0 && u <= band_.symbols) {
        emits_ = u < band_.symbols && (topology != Topology::kRna || frame + 1 < band_.frames);
        return frame * band_.columns + column;
      }
    }
    if (left) u_ += 32;
    return kNone;
  }

  __device__ __forceinline__ void fetch(int32_t begin, Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) {
      const int32_t offset = find(begin + i);
      chunk.offset[i] = offset;
      chunk.px[i] = chunk.py[i] = kLogZero<real>;
      if (offset >= 0) {
        if (emits_) chunk.px[i] = band_.px[offset];
        chunk.py[i] = band_.py[offset];
      }
      if (offset == kEnd) chunk.py[i] = 0;
    }
  }

  __device__ __forceinline__ void fill(int32_t begin, const Chunk& chunk) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) {
      const int slot = (begin + i) % BandMemory<real>::steps;
      real px = chunk.px[i];
      if (band_.delay_penalty != 0 && chunk.offset[i] >= 0) {
        px += band_.delay(chunk.offset[i] / band_.columns);
      }
      memory_.arcs[slot][lane] = {to_log_zero(px), to_log_zero(chunk.py[i])};
      memory_.offset[slot][lane] = chunk.offset[i];
    }
  }

  const BandLattice<real>& band_;
  BandMemory<real>& memory_;
  int32_t u_;           // the lane's column
  bool emits_ = false;  // whether the node found last has a symbol
};

// Stores the values of the nodes.
template <typename real>
__device__ void store_band_wave(const BandLattice<real>& band, int32_t steps,
                                BandMemory<real>& memory) {
  const int lane = threadIdx.x % 32;
  for (int32_t k = 0; k < steps; k += kBandChunk) {
    wait_for(memory.done, k + kBandChunk);
    const int slot = k % BandMemory<real>::steps;
#pragma unroll
    for (int i = 0; i < kBandChunk; ++i) {
      const int32_t offset = memory.offset[slot + i][lane];
      if (offset >= 0) band.values[offset] = from_log_zero(memory.arcs[slot + i][lane].px);
    }
    publish(memory.stored, k + kBandChunk);
  }
}

}  // namespace cuda
}  // namespace pruned_rnnt
