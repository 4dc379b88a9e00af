// The recursion over whole lattices, alpha and beta of all utterances in one launch.
//
// One block walks one utterance in one direction. A stripe of 32 neighbouring columns belongs to a
// pair of warps. The walker has a column a lane and moves along the frames as a wave: at step k
// lane l is at frame k - l, so that its neighbour l-1 has passed that frame one step before and
// hands over its value by a shuffle. The carrier fetches px and py ahead of the wave, cleans them
// of what the recursion must not see and lays them into a ring in shared memory in the order of the
// steps, and stores alpha or beta, which the walker leaves in the ring, when a frame's 32 columns
// are through. So the walker, whose steps depend on each other, has little else to do: its speed is
// the speed of the whole.
// A stripe's last lane hands its values to the next walker through a second ring. All warps of a
// block are resident, so that each may wait for others. More columns than a block's walkers can own
// are done in passes, and the edge between two passes is kept in global memory.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/stripe_counters.cuh"
#include "cuda/topology.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int kStripe = 32;     // columns of a walker
constexpr int kChunk = 8;       // steps and frames between two looks at the others' counters
constexpr int kRingSteps = 88;  // 32 of a frame's way through the wave, the rest is slack
constexpr int kEdgeSteps = 64;

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
  real* edge;           // room for frames + kStripe + kChunk numbers, if there are several passes
  int32_t frames;       // transitions by frame; 0 or less: there is no path
  int32_t symbols;
  int32_t emit_frames;   // frames below this have px (counted from the lattice's own beginning)
  int32_t value_frames;  // frames below this have a place in `values`
  real delay;            // delay * (middle - t) is added to px
  real middle;
};

template <typename real>
struct alignas(2 * sizeof(real)) ArcPair {
  real px, py;
};

// frames_run: whether neighbouring elements in memory are frames of one column (k2's layout)
// instead of columns of one frame (rows). The ring's rows are such that neither side meets a bank
// of shared memory twice.
template <bool frames_run>
constexpr int kRingRow = frames_run ? kStripe + 1 : kStripe;

// What the two warps of a stripe and its neighbours share.
template <typename real, bool frames_run>
struct StripeMemory {
  ArcPair<real> ring[kRingSteps * kRingRow<frames_run>];  // px and py of a step; then the value
  real edges[kEdgeSteps];                                 // what the last lane sends, by step
  int32_t filled;                                         // frames in the ring
  int32_t done;                                           // steps done
};

// A stripe's walker. `before` is the stripe that sends to this one, null at the lattice's edge or,
// with edge_in, where the values come from global memory; `after` the one that this one sends to,
// or edge_out. Returns the value of the walk's last frame in each column.
template <typename real, Topology topology, bool frames_run, bool backward>
__device__ real walk_stripe(int32_t nodes, bool first_stripe, StripeMemory<real, frames_run>& own,
                            const StripeMemory<real, frames_run>* before,
                            const StripeMemory<real, frames_run>* after, const real* edge_in,
                            real* edge_out) {
  constexpr int row = kRingRow<frames_run>;
  const int lane = threadIdx.x % 32;
  const int32_t steps = nodes + kStripe - 1;
  Column<real, topology, backward> column(first_stripe && lane == 0);
  // Edges of the frames of a chunk, one a lane; of frame t they have the step t + kStripe - 1.
  real arriving = kLogZero<real>, arriving_later = kLogZero<real>;
  const auto fetch_edge = [&](int32_t t) {
    return lane < kChunk && t + lane < nodes ? edge_in[t + lane + kStripe - 1] : kLogZero<real>;
  };
  if (edge_in != nullptr) arriving_later = fetch_edge(0);
  int ring_begin = 0;
  int32_t filled = 0, before_done = 0, after_done = 0;
  for (int32_t k = 0; k < steps; k += kChunk) {
    const int32_t last_frame = min(k + kChunk, nodes);
    if (filled < last_frame) filled = wait_for(own.filled, last_frame);
    if (before != nullptr) {
      const int32_t needed = last_frame + kStripe - 1;
      if (before_done < needed) before_done = wait_for(before->done, needed);
      if (lane < kChunk) arriving = before->edges[(k + lane + kStripe - 1) % kEdgeSteps];
    } else if (edge_in != nullptr) {
      arriving = arriving_later;
      arriving_later = fetch_edge(k + kChunk);
    }
    if (after != nullptr) {
      // The edges that are overwritten below have been read.
      const int32_t needed = k + kChunk - kEdgeSteps - kStripe + 1;
      if (after_done < needed) after_done = wait_for(after->done, needed);
    }
    ArcPair<real>* const ring = own.ring + ring_begin * row + lane;
    real* const edges = own.edges + k % kEdgeSteps;
    ArcPair<real> arcs[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) arcs[i] = ring[i * row];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      real neighbour = __shfl_up_sync(kAllLanes, column.sent(), 1);
      const real edge = __shfl_sync(kAllLanes, arriving, i);
      if (lane == 0) neighbour = edge;
      ring[i * row].px = column.step(arcs[i].px, arcs[i].py, neighbour);
      if (lane == kStripe - 1) edges[i] = column.sent();
      if (edge_out != nullptr && lane == kStripe - 1) edge_out[k + i] = column.sent();
    }
    publish(own.done, k + kChunk);
    ring_begin = ring_begin + kChunk == kRingSteps ? 0 : ring_begin + kChunk;
  }
  return own.ring[(nodes - 1 + lane) % kRingSteps * row + lane].px;
}

// A stripe's carrier. It does what it does for a chunk of frames and all columns, and a lane's
// nodes of a chunk are numbered so that 32 lanes lie along memory.
template <typename real, bool frames_run, bool backward>
class Carrier {
 public:
  __device__ __forceinline__ Carrier(const WaveLattice<real>& lattice, int32_t first_column,
                                     StripeMemory<real, frames_run>& memory)
      : lattice_(lattice),
        memory_(memory),
        lane_frame_(frames_run ? threadIdx.x % kChunk : 0),
        lane_column_(threadIdx.x % 32 / (frames_run ? kChunk : 1)),
        first_column_(first_column),
        nodes_(lattice.frames + 1) {
    for (int i = 0; i < kChunk; ++i) {
      const int32_t s = symbol(first_column + column(i));
      if (s >= 0 && s <= lattice.symbols) inside_ |= 1u << i;
      if (s >= 0 && s < lattice.symbols) emits_ |= 1u << i;
    }
  }

  __device__ void run() {
    // Frames before the first are filled too: with nothing, for the lanes that wait for the wave.
    int32_t begin = -kStripe;
    // Frames fetched before they are needed, in chunks.
    constexpr int ahead = sizeof(real) == 4 ? 3 : 2;
    ArcPair<real> fetched[ahead][kChunk];
#pragma unroll
    for (int p = 0; p < ahead; ++p) fetch(begin + p * kChunk, fetched[p]);
    // Slots are taken again once the frames that they belong to are stored, and that waits for a
    // frame's last lane.
    constexpr int32_t oldest = kRingSteps - kStripe + 1;
    while (begin < nodes_) {
#pragma unroll
      for (int p = 0; p < ahead; ++p) {
        store(begin - oldest);
        fill(begin, fetched[p]);
        publish(memory_.filled, begin + kChunk);
        fetch(begin + ahead * kChunk, fetched[p]);
        begin += kChunk;
      }
    }
    for (begin -= oldest; begin < nodes_; begin += kChunk) store(begin);
  }

 private:
  // What the walk calls (t,u) is (frame(t), symbol(u)) in memory.
  __device__ __forceinline__ int32_t frame(int32_t t) const {
    return backward ? lattice_.frames - t : t;
  }
  __device__ __forceinline__ int32_t symbol(int32_t u) const {
    return backward ? lattice_.symbols - u : u;
  }
  // Frame (from the chunk's first on) and column (of the stripe) of this lane's i-th node.
  __device__ __forceinline__ int frame_in_chunk(int i) const {
    return frames_run ? lane_frame_ : i;
  }
  __device__ __forceinline__ int column(int i) const {
    return frames_run ? lane_column_ + kStripe / kChunk * i : lane_column_;
  }
  __device__ __forceinline__ bool inside(int i) const { return inside_ >> i & 1; }
  __device__ __forceinline__ bool emits(int i) const { return emits_ >> i & 1; }

  // Whether all frames of a chunk have all arcs: most have, and need no look at each frame.
  __device__ __forceinline__ bool ordinary(int32_t begin) const {
    const int32_t first = backward ? frame(begin + kChunk - 1) : begin;
    return first >= 0 && first + kChunk < lattice_.frames;
  }

  // Address of the first of this lane's nodes of a chunk, and the way to the next.
  template <typename pointer>
  __device__ __forceinline__ pointer first_of(const Plane<pointer>& plane, int32_t begin) const {
    return plane.at(frame(begin + lane_frame_), symbol(first_column_ + lane_column_));
  }
  template <typename pointer>
  __device__ __forceinline__ int64_t step_of(const Plane<pointer>& plane) const {
    const int64_t step = frames_run ? kStripe / kChunk * plane.column_step : plane.frame_step;
    return backward ? -step : step;
  }

  __device__ __forceinline__ void fetch(int32_t begin, ArcPair<real> (&arcs)[kChunk]) const {
    if (ordinary(begin)) {
      fetch_chunk<false>(begin, arcs);
    } else if (begin + kChunk > 0 && begin < nodes_) {
      fetch_chunk<true>(begin, arcs);
    }
  }
  template <bool checked>
  __device__ __forceinline__ void fetch_chunk(int32_t begin, ArcPair<real> (&arcs)[kChunk]) const {
    const real* px = first_of(lattice_.px, begin);
    const real* py = first_of(lattice_.py, begin);
    const int64_t px_step = step_of(lattice_.px), py_step = step_of(lattice_.py);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int32_t at = frame(begin + frame_in_chunk(i));
      if (emits(i) && (!checked || (at >= 0 && at < lattice_.emit_frames))) arcs[i].px = *px;
      if (inside(i) && (!checked || (at >= 0 && at < lattice_.frames))) arcs[i].py = *py;
      px += px_step;
      py += py_step;
    }
  }

  // This lane's i-th slot of a chunk whose first frame begins at step `begin_slot` of the ring.
  __device__ __forceinline__ ArcPair<real>& slot(int32_t begin_slot, int i) const {
    int step = begin_slot + frame_in_chunk(i) + column(i);
    if (step >= kRingSteps) step -= kRingSteps;
    return memory_.ring[step * kRingRow<frames_run> + column(i)];
  }
  __device__ __forceinline__ static int32_t slot_of(int32_t t) {
    return (t + 2 * kRingSteps) % kRingSteps;
  }

  __device__ __forceinline__ void fill(int32_t begin, const ArcPair<real> (&arcs)[kChunk]) const {
    if (ordinary(begin)) {
      fill_chunk<false>(begin, arcs);
    } else {
      fill_chunk<true>(begin, arcs);
    }
  }
  template <bool checked>
  __device__ __forceinline__ void fill_chunk(int32_t begin,
                                             const ArcPair<real> (&arcs)[kChunk]) const {
    const int32_t begin_slot = slot_of(begin);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int32_t t = begin + frame_in_chunk(i), at = frame(t);
      // Before the first step there are no slots.
      if (checked && t + column(i) < 0) continue;
      const real delay = lattice_.delay * (lattice_.middle - static_cast<real>(at));
      ArcPair<real> clean;
      clean.px = emits(i) ? to_log_zero(arcs[i].px + delay) : kLogZero<real>;
      clean.py = inside(i) ? to_log_zero(arcs[i].py) : kLogZero<real>;
      if (checked) {
        if (t < 0 || t >= nodes_ || at >= lattice_.emit_frames) clean.px = kLogZero<real>;
        if (t < 0 || t >= nodes_) clean.py = kLogZero<real>;
        // The step from the last node costs nothing.
        if (at == lattice_.frames && inside(i)) clean.py = 0;
      }
      slot(begin_slot, i) = clean;
    }
  }

  // Stores a chunk of frames once their last column is through.
  __device__ __forceinline__ void store(int32_t begin) const {
    if (begin + kChunk <= 0) return;
    wait_for(memory_.done, min(begin + kChunk, nodes_) + kStripe - 1);
    if (ordinary(begin)) {
      store_chunk<false>(begin);
    } else {
      store_chunk<true>(begin);
    }
    __syncwarp();
  }
  template <bool checked>
  __device__ __forceinline__ void store_chunk(int32_t begin) const {
    const int32_t begin_slot = slot_of(begin);
    real* value = first_of(lattice_.values, begin);
    const int64_t value_step = step_of(lattice_.values);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int32_t at = frame(begin + frame_in_chunk(i));
      if (inside(i) &&
          (!checked || (at >= 0 && at <= lattice_.frames && at < lattice_.value_frames))) {
        *value = from_log_zero(slot(begin_slot, i).px);
      }
      value += value_step;
    }
  }

  const WaveLattice<real>& lattice_;
  StripeMemory<real, frames_run>& memory_;
  const int lane_frame_, lane_column_;
  const int32_t first_column_, nodes_;
  // Bit i: whether this lane's i-th column is one of the lattice's, and whether it has a symbol.
  unsigned inside_ = 0, emits_ = 0;
};

// All stripes of one utterance in one direction, by a block of pairs of warps: walkers first, then
// their carriers. The backward walk ends with log P.
template <typename real, Topology topology, bool frames_run, bool backward>
__device__ void walk_lattice(const WaveLattice<real>& lattice, real* total) {
  const int pairs = blockDim.x / 64, pair = threadIdx.x / 32 % pairs, lane = threadIdx.x % 32;
  const bool walks = threadIdx.x / 32 < pairs;
  if (lattice.frames <= 0) {
    if (backward && threadIdx.x == 0) *total = minus_infinity<real>();
    return;
  }
  auto* const memory = dynamic_shared_memory<StripeMemory<real, frames_run>>();
  const int32_t stripes = lattice.symbols / kStripe + 1;
  // Passes of equal size end sooner than full ones and a rest.
  const int32_t passes = (stripes + pairs - 1) / pairs;
  const int32_t stripes_a_pass = (stripes + passes - 1) / passes;
  for (int32_t group = 0; group < stripes; group += stripes_a_pass) {
    if (walks && lane == 0) memory[pair].filled = memory[pair].done = 0;
    __syncthreads();
    const int32_t stripe = group + pair;
    const int32_t group_end = min(group + stripes_a_pass, stripes);
    if (stripe < group_end) {
      if (walks) {
        const bool has_before = pair > 0, has_after = stripe + 1 < group_end;
        const real corner = walk_stripe<real, topology, frames_run, backward>(
            lattice.frames + 1, stripe == 0, memory[pair], has_before ? memory + pair - 1 : nullptr,
            has_after ? memory + pair + 1 : nullptr,
            !has_before && stripe > 0 ? lattice.edge : nullptr,
            !has_after && stripe + 1 < stripes ? lattice.edge : nullptr);
        if (backward && stripe * kStripe + lane == lattice.symbols) *total = from_log_zero(corner);
      } else {
        Carrier<real, frames_run, backward>(lattice, stripe * kStripe, memory[pair]).run();
      }
    }
    __syncthreads();
  }
}

// More pairs than this find no room in shared memory anyway, and fewer get more registers each.
template <typename real>
constexpr int kWavePairs = sizeof(real) == 4 ? 10 : 5;
template <typename real>
constexpr int kWaveThreads = 64 * kWavePairs<real>;

// How a block for lattices of up to `columns` columns is launched.
struct WaveBlock {
  uint32_t threads;
  size_t shared_bytes;
};

template <typename real, bool frames_run>
WaveBlock wave_block(int64_t columns, const DeviceLimits& limits) {
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  const size_t pair_bytes = sizeof(StripeMemory<real, frames_run>);
  const int64_t fitting = limits.shared_bytes / static_cast<int64_t>(pair_bytes);
  const int64_t pairs =
      std::max<int64_t>(1, std::min<int64_t>({stripes, fitting, kWavePairs<real>}));
  return {static_cast<uint32_t>(64 * pairs), pairs * pair_bytes};
}

}  // namespace cuda
}  // namespace pruned_rnnt
