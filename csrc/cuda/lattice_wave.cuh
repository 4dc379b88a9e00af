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
// A stripe's last lane hands its values to the next walker through a second ring. All warps go in
// periods of kChunk steps with a barrier between them; what each does in a period follows from its
// number alone (stripe w is kLag periods behind stripe w-1), and whoever needs something finds it
// made in an earlier period. More columns than a block's walkers can own are done in passes, and
// the edge between two passes is kept in global memory.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/topology.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int kStripe = 32;  // columns of a walker
constexpr int kChunk = 8;    // steps of a period, and frames that a carrier handles in one
constexpr int kLag = kStripe / kChunk + 1;
// A frame's way through the ring: filled a period before its first lane's, 32 steps of the wave,
// stored a period after its last lane's, and before the slots are taken again in that period.
constexpr int kRingSteps = 80;
constexpr int kEdgeSteps = 32;

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

// What the two warps of a stripe and the next walker share.
template <typename real, bool frames_run>
struct StripeMemory {
  ArcPair<real> ring[kRingSteps * kRingRow<frames_run>];  // px and py of a step; then the value
  real edges[kEdgeSteps];                                 // what the last lane sends, by step
};

// Where a stripe gets the values that cross its first edge from, and where it leaves its own: the
// stripe before in this pass, or global memory between two passes; all null at the lattice's ends.
template <typename real>
struct StripeEdges {
  const real* before;
  const real* in;
  real* out;
};

template <typename real, Topology topology, bool frames_run, bool backward>
class Walker {
 public:
  __device__ __forceinline__ Walker(int32_t nodes, bool first_stripe,
                                    StripeMemory<real, frames_run>& memory,
                                    const StripeEdges<real>& edges)
      : nodes_(nodes), memory_(memory), edges_(edges), column_(first_stripe && lane() == 0) {
    if (edges_.in != nullptr) arriving_later_ = edge_in(0);
  }

  // Steps kChunk * chunk and on. Those behind the last frame do no harm.
  __device__ __forceinline__ void walk(int32_t chunk) {
    if (chunk < 0 || chunk * kChunk >= nodes_ + kStripe - 1) return;
    constexpr int row = kRingRow<frames_run>;
    const int32_t k = chunk * kChunk;
    // Edges of the frames k .. k + kChunk - 1, one a lane; that of frame t is of step t + 31.
    real arriving = kLogZero<real>;
    if (edges_.before != nullptr) {
      if (lane() < kChunk) arriving = edges_.before[(k + lane() + kStripe - 1) % kEdgeSteps];
    } else if (edges_.in != nullptr) {
      arriving = arriving_later_;
      arriving_later_ = edge_in(k + kChunk);
    }
    ArcPair<real>* const ring = memory_.ring + k % kRingSteps * row + lane();
    real* const edges = memory_.edges + k % kEdgeSteps;
    ArcPair<real> arcs[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) arcs[i] = ring[i * row];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      real neighbour = __shfl_up_sync(kAllLanes, column_.sent(), 1);
      const real edge = __shfl_sync(kAllLanes, arriving, i);
      if (lane() == 0) neighbour = edge;
      ring[i * row].px = column_.step(arcs[i].px, arcs[i].py, neighbour);
      if (lane() == kStripe - 1) edges[i] = column_.sent();
    }
    if (edges_.out != nullptr) {
      __syncwarp();
      if (lane() < kChunk) edges_.out[k + lane()] = edges[lane()];
    }
  }

  // This lane's value at the last frame, once all is walked.
  __device__ __forceinline__ real corner() const {
    return memory_.ring[(nodes_ - 1 + lane()) % kRingSteps * kRingRow<frames_run> + lane()].px;
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ real edge_in(int32_t t) const {
    return lane() < kChunk && t + lane() < nodes_ ? edges_.in[t + lane() + kStripe - 1]
                                                  : kLogZero<real>;
  }

  const int32_t nodes_;
  StripeMemory<real, frames_run>& memory_;
  const StripeEdges<real> edges_;
  Column<real, topology, backward> column_;
  real arriving_later_ = kLogZero<real>;
};

// A lane's nodes of a chunk of frames and all columns are numbered so that 32 lanes lie along
// memory.
template <typename real, bool frames_run, bool backward>
class Carrier {
 public:
  // Chunks that are fetched before they are needed: about a microsecond.
  static constexpr int ahead = 2;

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

  // The period in which the walker does its chunk `chunk`. `turn` is the period's number modulo
  // `ahead`: what is fetched stays in its registers until its turn comes again.
  template <int turn>
  __device__ __forceinline__ void carry(int32_t chunk) {
    store((chunk - kLag) * kChunk);
    __syncwarp();
    fill((chunk + 1) * kChunk, fetched_[turn]);
    fetch((chunk + 1 + ahead) * kChunk, fetched_[turn]);
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
    return (t + kRingSteps) % kRingSteps;
  }

  // Frames before the first are filled too, with nothing: for the lanes that wait for the wave.
  __device__ __forceinline__ void fill(int32_t begin, const ArcPair<real> (&arcs)[kChunk]) const {
    if (ordinary(begin)) {
      fill_chunk<false>(begin, arcs);
    } else if (begin < nodes_) {
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

  __device__ __forceinline__ void store(int32_t begin) const {
    if (ordinary(begin)) {
      store_chunk<false>(begin);
    } else if (begin >= 0 && begin < nodes_) {
      store_chunk<true>(begin);
    }
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
  ArcPair<real> fetched_[ahead][kChunk];
};

// All stripes of one utterance in one direction, by a block of pairs of warps: walkers first, then
// their carriers. The backward walk ends with log P.
template <typename real, Topology topology, bool frames_run, bool backward>
__device__ void walk_lattice(const WaveLattice<real>& lattice, real* total) {
  const int pairs = blockDim.x / 64, pair = threadIdx.x / 32 % pairs;
  const bool walks = threadIdx.x / 32 < pairs;
  if (lattice.frames <= 0) {
    if (backward && threadIdx.x == 0) *total = minus_infinity<real>();
    return;
  }
  auto* const memory = dynamic_shared_memory<StripeMemory<real, frames_run>>();
  const int32_t nodes = lattice.frames + 1, stripes = lattice.symbols / kStripe + 1;
  // Passes of equal size end sooner than full ones and a rest.
  const int32_t passes = (stripes + pairs - 1) / pairs;
  const int32_t stripes_a_pass = (stripes + passes - 1) / passes;
  for (int32_t group = 0; group < stripes; group += stripes_a_pass) {
    const int32_t in_pass = min(stripes_a_pass, stripes - group);
    const int32_t stripe = group + pair;
    const bool takes_part = pair < in_pass;
    StripeEdges<real> edges{};
    if (pair > 0) edges.before = memory[pair - 1].edges;
    if (pair == 0 && group > 0) edges.in = lattice.edge;
    if (pair + 1 == in_pass && stripe + 1 < stripes) edges.out = lattice.edge;
    Walker<real, topology, frames_run, backward> walker(nodes, stripe == 0, memory[pair], edges);
    using StripeCarrier = Carrier<real, frames_run, backward>;
    StripeCarrier carrier(lattice, stripe * kStripe, memory[pair]);

    // From the period in which the first carrier fetches its first frames to that in which the last
    // one stores its last.
    const int32_t last = (nodes - 1) / kChunk + kLag + kLag * (in_pass - 1);
    int32_t period = -(kLag + StripeCarrier::ahead);
    const auto one_period = [&](auto turn) {
      if (takes_part) {
        const int32_t chunk = period - kLag * pair;
        if (walks) {
          walker.walk(chunk);
        } else {
          carrier.template carry<decltype(turn)::value>(chunk);
        }
      }
      __syncthreads();
      ++period;
    };
    while (period <= last) {
      one_period(std::integral_constant<int, 0>());
      one_period(std::integral_constant<int, 1>());
    }
    if (backward && walks && takes_part && stripe * kStripe + threadIdx.x % 32 == lattice.symbols) {
      *total = from_log_zero(walker.corner());
    }
    // The next pass fills the ring anew.
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
