// The recursion over whole lattices, alpha and beta of all utterances in one launch.
//
// One block walks one utterance in one direction. Each warp owns a stripe of 32 neighbouring
// columns (one a lane) and walks along the frames as a wave: at step k lane l is at frame k - l, so
// that its neighbour l-1 has passed that frame one step before and hands over its value by a
// shuffle. A stripe's last lane hands its values to the next warp through a ring in shared memory;
// all warps of a block are resident, so that each may wait for its neighbours. More columns than a
// block's warps can own are done in passes, one group of stripes after the other, and the edge
// between two groups is kept in global memory.
// px and py arrive through a ring of 64 frames in shared memory, 16 frames at a time, copied while
// the steps before run; alpha or beta of a node takes the place of its px there until it is stored.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/topology.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int kStripe = 32;      // columns of a warp
constexpr int kChunk = 16;       // frames copied at a time
constexpr int kRingFrames = 64;  // a wave's 32 frames, the next chunk, and one being stored

// Address of an element: base + t * frame_step + u * column_step.
template <typename pointer>
struct Plane {
  pointer base;
  int64_t frame_step, column_step;

  __device__ __forceinline__ pointer at(int32_t t, int32_t u) const {
    return base + t * frame_step + u * column_step;
  }
};

// One utterance as the walk sees it: from node (0,0) to node (frames, symbols).
template <typename real>
struct WaveLattice {
  Plane<const real*> px, py;
  Plane<real*> values;  // alpha or beta
  real* edge;           // room for frames + 1 numbers
  int32_t frames;       // transitions by frame; 0 or less: there is no path
  int32_t symbols;
  int32_t emit_frames;   // frames below this have px (counted from the lattice's own beginning)
  int32_t value_frames;  // frames below this have a place in `values`
  real delay;            // delay * (middle - t) is added to px
  real middle;
};

// Shared memory of a block of `warps` warps.
template <typename real>
struct WaveMemory {
  __device__ WaveMemory(int warps) {
    real* memory = dynamic_shared_memory<real>();
    const int warp = threadIdx.x / 32;
    px = memory + warp * 2 * kRingFrames * kStripe;
    py = px + kRingFrames * kStripe;
    edges = memory + warps * 2 * kRingFrames * kStripe;
    produced = reinterpret_cast<volatile int32_t*>(edges + warps * kRingFrames);
    consumed = produced + warps;
  }
  static size_t bytes(int warps) {
    return warps * ((2 * kRingFrames * kStripe + kRingFrames) * sizeof(real) + 2 * sizeof(int32_t));
  }

  real *px, *py;  // this warp's rings
  real* edges;    // of all warps, kRingFrames each: what the last lane of a stripe sends
  // Of all warps: frames whose edge is in the ring, and frames that the next warp has read.
  volatile int32_t *produced, *consumed;
};

__device__ __forceinline__ void wait_for(volatile int32_t* count, int32_t least) {
  while (*count < least) __nanosleep(20);
  __threadfence_block();
  __syncwarp();
}

// frames_run: whether neighbouring elements in memory are frames of one column (k2's layout)
// instead of columns of one frame (rows). The ring's order is such that neither copying nor the
// wave's skewed access meets a bank twice.
template <bool frames_run>
__device__ __forceinline__ int ring_slot(int32_t t, int column) {
  const int slot = t & (kRingFrames - 1);
  return frames_run ? column * kRingFrames + slot : slot * kStripe + column;
}

// Calls work(t, column) for the nodes of a chunk of frames from `begin` on, 32 lanes along memory.
template <bool frames_run, typename Work>
__device__ __forceinline__ void for_chunk(int32_t begin, int lane, Work&& work) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (frames_run) {
      work(begin + lane % kChunk, lane / kChunk + (kStripe / kChunk) * i);
    } else {
      work(begin + i, lane);
    }
  }
}

// A stripe's walk. `from` and `to` hand over what crosses the stripe's edges: rings in shared
// memory with their counters, or, without counters, global memory; null at the lattice's ends.
template <typename real>
struct Edge {
  real* values = nullptr;
  volatile int32_t* produced = nullptr;
  volatile int32_t* consumed = nullptr;

  __device__ __forceinline__ real* at(int32_t t) const {
    return values + (produced != nullptr ? (t & (kRingFrames - 1)) : t);
  }
};

template <typename real, Topology topology, bool frames_run, bool backward>
__device__ real walk_stripe(const WaveLattice<real>& lattice, const WaveMemory<real>& memory,
                            int32_t first_column, Edge<real> from, Edge<real> to) {
  const int lane = threadIdx.x % 32;
  const int32_t nodes = lattice.frames + 1;  // along the walk
  const int32_t u = first_column + lane;
  // What the walk calls (t,u) is (frame(t), symbol(u)) in memory.
  const auto frame = [&](int32_t t) { return backward ? lattice.frames - t : t; };
  const auto symbol = [&](int32_t column) { return backward ? lattice.symbols - column : column; };

  const auto load_chunk = [&](int32_t begin) {
    for_chunk<frames_run>(begin, lane, [&](int32_t t, int column) {
      const int32_t at = frame(t), s = symbol(first_column + column);
      if (t >= nodes || s < 0 || s > lattice.symbols) return;
      const int slot = ring_slot<frames_run>(t, column);
      if (at < lattice.emit_frames && s < lattice.symbols) {
        copy_async(memory.px + slot, lattice.px.at(at, s));
      }
      if (at < lattice.frames) copy_async(memory.py + slot, lattice.py.at(at, s));
    });
    commit_copies();
  };
  const auto store_chunk = [&](int32_t begin) {
    for_chunk<frames_run>(begin, lane, [&](int32_t t, int column) {
      const int32_t at = frame(t), s = symbol(first_column + column);
      if (t < 0 || t >= nodes || at >= lattice.value_frames) return;
      if (s < 0 || s > lattice.symbols) return;
      *lattice.values.at(at, s) = from_log_zero(memory.px[ring_slot<frames_run>(t, column)]);
    });
  };

  Column<real, topology, backward> column(u == 0);
  real corner = kLogZero<real>;
  load_chunk(0);
  const int32_t steps = nodes + kStripe - 1;
  int32_t k = 0;
  for (; k < steps; k += kChunk) {
    wait_copies<0>();
    __syncwarp();
    store_chunk(k - kRingFrames + kChunk);
    __syncwarp();
    load_chunk(k + kChunk);

    real arriving = kLogZero<real>;
    if (from.values != nullptr) {
      const int32_t needed = min(k + kChunk, nodes);
      if (from.produced != nullptr) wait_for(from.produced, needed);
      if (k + lane < needed) arriving = *from.at(k + lane);
      __syncwarp();
      if (from.produced != nullptr && lane == 0) {
        __threadfence_block();
        *from.consumed = needed;
      }
    }
    // The steps below write edges of the frames up to k + kChunk - kStripe.
    if (to.produced != nullptr) {
      wait_for(to.consumed, min(k + kChunk - kStripe + 1 - kRingFrames, nodes));
    }

    real px[kChunk], py[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int32_t t = k + i - lane, at = frame(t), s = symbol(u);
      const bool inside = t >= 0 && t < nodes && s >= 0 && s <= lattice.symbols;
      const int slot = ring_slot<frames_run>(t, lane);
      px[i] = kLogZero<real>;
      if (inside && at < lattice.emit_frames && s < lattice.symbols) {
        const real delay = lattice.delay * (lattice.middle - static_cast<real>(at));
        px[i] = to_log_zero(memory.px[slot] + (lattice.delay == 0 ? real(0) : delay));
      }
      // The step from the last node costs nothing.
      py[i] = kLogZero<real>;
      if (inside) py[i] = at < lattice.frames ? to_log_zero(memory.py[slot]) : real(0);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int32_t t = k + i - lane;
      real neighbour = __shfl_up_sync(kAllLanes, column.sent(), 1);
      const real edge = __shfl_sync(kAllLanes, arriving, i);
      if (lane == 0) neighbour = edge;
      const real value = column.step(px[i], py[i], neighbour);
      if (t >= 0 && t < nodes) {
        memory.px[ring_slot<frames_run>(t, lane)] = value;
        if (to.values != nullptr && lane == kStripe - 1) *to.at(t) = column.sent();
        if (t == nodes - 1) corner = value;
      }
    }
    if (to.produced != nullptr && lane == kStripe - 1) {
      __threadfence_block();
      *to.produced = min(k + kChunk - kStripe + 1, nodes);
    }
  }
  wait_copies<0>();
  __syncwarp();
  store_chunk(k - kRingFrames + kChunk);
  store_chunk(k - kRingFrames + 2 * kChunk);
  store_chunk(k - kRingFrames + 3 * kChunk);
  __syncwarp();
  return corner;
}

// All stripes of one utterance in one direction; returns to the lane that ends the walk, at node
// (frames, symbols), its value.
template <typename real, Topology topology, bool frames_run, bool backward>
__device__ void walk_lattice(const WaveLattice<real>& lattice, real* total) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (lattice.frames <= 0) {
    if (backward && threadIdx.x == 0) *total = minus_infinity<real>();
    return;
  }
  const WaveMemory<real> memory(warps);
  const int32_t stripes = lattice.symbols / kStripe + 1;
  for (int32_t group = 0; group < stripes; group += warps) {
    if (lane == 0) {
      memory.produced[warp] = 0;
      memory.consumed[warp] = 0;
    }
    __syncthreads();
    const int32_t stripe = group + warp;
    if (stripe < stripes) {
      Edge<real> from, to;
      if (warp > 0) {
        from = {memory.edges + (warp - 1) * kRingFrames, memory.produced + warp - 1,
                memory.consumed + warp - 1};
      } else if (group > 0) {
        from.values = lattice.edge;
      }
      if (stripe + 1 < stripes) {
        if (warp + 1 < warps) {
          to = {memory.edges + warp * kRingFrames, memory.produced + warp, memory.consumed + warp};
        } else {
          to.values = lattice.edge;
        }
      }
      const real corner = walk_stripe<real, topology, frames_run, backward>(
          lattice, memory, stripe * kStripe, from, to);
      if (backward && stripe * kStripe + lane == lattice.symbols) *total = from_log_zero(corner);
    }
    __syncthreads();
  }
}

// More warps than this find no room in shared memory anyway (WaveMemory, 227 KiB), and fewer get
// more registers each.
template <typename real>
constexpr int kWaveWarps = sizeof(real) == 4 ? 13 : 6;

// Warps of a block for lattices of up to `columns` columns.
template <typename real>
int wave_warps(int64_t columns, const DeviceLimits& limits) {
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  const int64_t fitting = limits.shared_bytes / static_cast<int64_t>(WaveMemory<real>::bytes(1));
  return static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>({stripes, fitting, kWaveWarps<real>})));
}

}  // namespace cuda
}  // namespace pruned_rnnt
