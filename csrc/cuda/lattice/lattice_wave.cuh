// The recursion over whole lattices and wide bands (formulas: halves.cuh), a half of an utterance
// by a block. Nodes outside a band have probability 0.
//
// A team of warps owns a stripe of 32 neighbouring columns. Its walker has a column in each lane
// and moves along the frames as a wave: at step k lane l is at frame k - l, so its neighbour l-1
// computed that frame one step before and passes its value by a shuffle:
//
//             t 0  1  2  3          numbers: the step that computes the node
//   lane 0      0  1  2  3
//   lane 1      1  2  3  4
//   lane 2      2  3  4  5
//
// A carrier loads the nodes' inputs ahead of the wave, replaces invalid ones and stores them in a
// ring in shared memory in the order of the steps. A second carrier (the same one if there are many
// stripes) stores the walker's results from the ring to global memory. So the walker, whose steps
// depend on each other, does little else (0.14 us a step). A stripe's last lane passes its values
// to the next walker through a second ring. All warps work in periods of kChunk steps with a
// barrier between them; stripe w is kLag periods behind stripe w-1, so that every value is ready
// one period before it is used. More columns than a block's walkers can own take several passes,
// and the edge between two passes goes through global memory.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/lattice/wave_carrier.cuh"

namespace pruned_rnnt::cuda {

// Values that cross a stripe's first edge (from the stripe before in this pass, or from global
// memory) and its last one (to global memory between two passes); null at the ends of the lattice.
// The next stripe of the pass reads the ring of this one.
template <typename real, typename Number>
struct StripeEdges {
  const Number* before;
  const real* in;
  real* out;
};

template <typename real, Topology topology, Layout layout, Walk walk>
class Walker {
  using OwnColumn = Column<real, topology, walk>;

 public:
  using Number = typename OwnColumn::Number;
  using Edges = StripeEdges<real, Number>;

  // begin: the value with which the walk enters this lane's column.
  RNNT_DEVICE Walker(int32_t nodes, const Number& begin, StripeMemory<real, layout>& memory,
                     const Edges& edges)
      : nodes_(nodes), memory_(memory), edges_(edges), column_(begin) {
    if (edges_.in != nullptr) arriving_later_ = edge_in(0);
  }

  // The kChunk steps of a chunk. Steps behind the last frame have no effect.
  RNNT_DEVICE void steps(int32_t chunk) {
    if (chunk < 0 || chunk * kChunk >= nodes_ + kStripe - 1) return;
    constexpr int row = kRingRow<layout>;
    const int32_t k = chunk * kChunk;
    // Edges of frames k .. k + kChunk - 1, one in each lane; frame t has its edge in step t + 31.
    Number arriving = Number::zero();
    if (edges_.before != nullptr) {
      if (lane() < kChunk) arriving = edges_.before[(k + lane() + kStripe - 1) % kEdgeSteps];
    } else if (edges_.in != nullptr) {
      arriving = arriving_later_;
      arriving_later_ = edge_in(k + kChunk);
    }
    NodePair<real>* const ring = memory_.ring + k % kRingSteps * row + lane();
    Number* const edges = memory_.template edges_of<Number>() + k % kEdgeSteps;
    NodePair<real> nodes[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) nodes[i] = ring[i * row];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      Number neighbour = column_.sent().of_lane_before();
      const Number edge = arriving.of_lane(i);
      if (lane() == 0) neighbour = edge;
      const NodePair<real> made = column_.step(nodes[i], neighbour);
      ring[i * row] = made;
      if (lane() == kStripe - 1) edges[i] = column_.sent();
      if (makes_sums(walk) && k + i - lane() == nodes_ - 1) {
        last_ = column_.own();
        last_share_ = made.first;
      }
    }
    column_.normalise();
    if (edges_.out == nullptr) return;
    __syncwarp();
    const int32_t t = k + lane() - (kStripe - 1);
    if (lane() < kChunk && t >= 0 && t < nodes_) {
      edges[lane()].save(edges_.out + t, edges_.out + nodes_ + t);
    }
  }

  // Sum and share of this lane's column at the last node of the walk.
  RNNT_DEVICE const Number& last() const { return last_; }
  RNNT_DEVICE real last_share() const { return last_share_; }

 private:
  RNNT_DEVICE static int lane() { return threadIdx.x % 32; }
  RNNT_DEVICE Number edge_in(int32_t begin) const {
    const int32_t t = begin + lane();
    if (lane() >= kChunk || t >= nodes_) return Number::zero();
    return Number::load(edges_.in + t, edges_.in + nodes_ + t);
  }

  const int32_t nodes_;
  StripeMemory<real, layout>& memory_;
  const Edges edges_;
  OwnColumn column_;
  Number arriving_later_ = Number::zero();
  Number last_ = Number::zero();
  real last_share_ = 0;
};

// One walk over all stripes of half an utterance, by a block of teams of warps: first the walkers,
// then the carriers that load, then those that store if they are separate.
template <typename real, Topology topology, Layout layout, int team_warps, Walk walk>
RNNT_DEVICE void walk_stripes(const WaveLattice<real>& lattice, const CutMemory<real>& cut,
                              double log_p) {
  using StripeWalker = Walker<real, topology, layout, walk>;
  using StripeCarrier = Carrier<real, layout, walk>;
  using Number = typename StripeWalker::Number;
  constexpr bool early = is_early(walk);
  const int teams = blockDim.x / (32 * team_warps), team = threadIdx.x / 32 % teams;
  const int role = threadIdx.x / 32 / teams;
  const bool walks = role == 0, loads = role == 1, stores = role == team_warps - 1;
  auto* const memory = dynamic_shared_memory<StripeMemory<real, layout>>();
  const int32_t nodes = lattice.frames + 1, stripes = lattice.symbols / kStripe + 1;
  // Passes of equal size are faster than full ones and a remainder.
  const int32_t passes = (stripes + teams - 1) / teams;
  const int32_t stripes_a_pass = (stripes + passes - 1) / passes;
  for (int32_t group = 0; group < stripes; group += stripes_a_pass) {
    const int32_t in_pass = min(stripes_a_pass, stripes - group);
    const int32_t stripe = group + team;
    const bool takes_part = team < in_pass;
    typename StripeWalker::Edges edges{};
    if (team > 0) {
      edges.before = memory[team - 1].template edges_of<Number>();
    } else if (group > 0) {
      edges.in = cut.edges(early);
    }
    if (team + 1 == in_pass && stripe + 1 < stripes) edges.out = cut.edges(early);
    const int32_t column = stripe * kStripe + threadIdx.x % 32;
    const int32_t symbol = goes_back(walk) ? lattice.symbols - column : column;
    const bool is_column = walks && takes_part && column <= lattice.symbols;
    const int32_t place = is_column ? lattice.place_at_cut(early, symbol) : -1;
    Number begin = Number::zero();
    if constexpr (makes_sums(walk)) {
      if (column == 0) begin = Number::one();
    } else {
      if (place >= 0) begin = cut_mass(cut, place, log_p);
    }
    StripeWalker walker(nodes, begin, memory[team], edges);
    StripeCarrier carrier(lattice, cut.share(), stripe * kStripe, memory[team]);

    // From the period in which the first carrier fetches its first frames to the one in which the
    // last carrier stores its last frames.
    const int32_t last = (nodes - 1) / kChunk + kLag + kLag * (in_pass - 1);
    int32_t period = -(kLag + StripeCarrier::ahead);
    const auto one_period = [&](auto turn) {
      if (takes_part) {
        const int32_t chunk = period - kLag * team;
        if (walks) walker.steps(chunk);
        if (stores) carrier.store(chunk);
        if (loads) carrier.template load<decltype(turn)::value>(chunk);
      }
      __syncthreads();
      ++period;
    };
    while (period <= last) {
      one_period(std::integral_constant<int, 0>());
      one_period(std::integral_constant<int, 1>());
    }
    if constexpr (makes_sums(walk)) {
      if (place >= 0) {
        cut.save(early, place, walker.last());
        if (early) cut.share()[place] = walker.last_share();
      }
    }
    // The next pass overwrites the ring.
    __syncthreads();
  }
}

// The sums of a half, or its masses, if there is a path. log_p: of log_total.
template <typename real, Topology topology, Layout layout, int team_warps, bool sums>
RNNT_DEVICE void walk_half(const WaveLattice<real>& lattice, bool early, const CutMemory<real>& cut,
                           double log_p) {
  constexpr Walk early_walk = sums ? Walk::kEarlySums : Walk::kEarlyMasses;
  constexpr Walk late_walk = sums ? Walk::kLateSums : Walk::kLateMasses;
  const WaveLattice<real> half = lattice.half(early);
  if (early) {
    walk_stripes<real, topology, layout, team_warps, early_walk>(half, cut, log_p);
  } else {
    walk_stripes<real, topology, layout, team_warps, late_walk>(half, cut, log_p);
  }
}

// Teams of two warps: shared memory has no room for more, and fewer have more registers each.
// Teams of three warps are faster, but only few have enough registers.
template <typename real>
constexpr int kMostTeams = sizeof(real) == 4 ? 10 : 5;
constexpr int kMostTeamsOfThree = 5;
template <typename real, int team_warps>
constexpr int kWaveThreads =
    32 * team_warps * (team_warps == 3 ? kMostTeamsOfThree : kMostTeams<real>);

// Launch configuration of a block for lattices of up to `columns` columns.
template <typename real>
struct WaveBlock {
  int team_warps;
  uint32_t threads;
  size_t shared_bytes;

  // Calls work(std::integral_constant<int, team_warps>).
  template <typename Work>
  void dispatch(Work&& work) const {
    if constexpr (sizeof(real) == 4) {
      if (team_warps == 3) return work(std::integral_constant<int, 3>());
    }
    work(std::integral_constant<int, 2>());
  }
};

template <typename real, Layout layout>
WaveBlock<real> wave_block(int64_t columns, int most_bytes) {
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  const size_t team_bytes = sizeof(StripeMemory<real, layout>);
  const int64_t fitting = most_bytes / int64_t(team_bytes);
  const int64_t teams =
      std::max<int64_t>(1, std::min<int64_t>({stripes, fitting, kMostTeams<real>}));
  const int team_warps = sizeof(real) == 4 && teams <= kMostTeamsOfThree ? 3 : 2;
  return {team_warps, uint32_t(32 * team_warps * teams), teams * team_bytes};
}

}  // namespace pruned_rnnt::cuda
