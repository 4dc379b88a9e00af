// The recursion over whole lattices, alpha and beta of all utterances in one launch.
//
// One block walks one utterance in one direction. A stripe of 32 neighbouring columns belongs to a
// team of warps. The walker has a column a lane and moves along the frames as a wave: at step k
// lane l is at frame k - l, so that its neighbour l-1 has passed that frame one step before and
// hands over its value by a shuffle. A carrier fetches px and py ahead of the wave, cleans them
// of what the recursion must not see and lays them into a ring in shared memory in the order of the
// steps, and another, or the same where there are many stripes, stores alpha or beta, which the
// walker leaves in the ring, when a frame's 32 columns are through. So the walker, whose steps
// depend on each other, has little else to do.
// A stripe's last lane hands its values to the next walker through a second ring. All warps go in
// periods of kChunk steps with a barrier between them; what each does in a period follows from its
// number alone (stripe w is kLag periods behind stripe w-1), and whoever needs something finds it
// made in an earlier period. More columns than a block's walkers can own are done in passes, and
// the edge between two passes is kept in global memory.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/wave_carrier.cuh"

namespace pruned_rnnt {
namespace cuda {

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
    Probability<real> arriving = Probability<real>::zero();
    if (edges_.before != nullptr) {
      if (lane() < kChunk) arriving = edges_.before[(k + lane() + kStripe - 1) % kEdgeSteps];
    } else if (edges_.in != nullptr) {
      arriving = Probability<real>::exp(arriving_later_);
      arriving_later_ = edge_in(k + kChunk);
    }
    ArcPair<real>* const ring = memory_.ring + k % kRingSteps * row + lane();
    Probability<real>* const edges = memory_.edges + k % kEdgeSteps;
    ArcPair<real> arcs[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) arcs[i] = ring[i * row];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      Probability<real> neighbour = column_.sent().of_lane_before();
      const Probability<real> edge = arriving.of_lane(i);
      if (lane() == 0) neighbour = edge;
      ring[i * row].px = column_.step(arcs[i].px, arcs[i].py, neighbour);
      if (lane() == kStripe - 1) edges[i] = column_.sent();
    }
    column_.normalise();
    if (edges_.out != nullptr) {
      __syncwarp();
      if (lane() < kChunk) edges_.out[k + lane()] = edges[lane()].log();
    }
  }

  // This lane's value at the last frame, once all is walked.
  __device__ __forceinline__ real corner() const {
    return memory_.ring[(nodes_ - 1 + lane()) % kRingSteps * kRingRow<frames_run> + lane()].px;
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ real edge_in(int32_t t) const {
    if (lane() >= kChunk || t + lane() >= nodes_) return kLogZero<real>;
    return to_log_zero(edges_.in[t + lane() + kStripe - 1]);
  }

  const int32_t nodes_;
  StripeMemory<real, frames_run>& memory_;
  const StripeEdges<real> edges_;
  Column<real, topology, backward> column_;
  real arriving_later_ = kLogZero<real>;
};

// All stripes of one utterance in one direction, by a block of teams of warps: walkers first, then
// their carriers, of which those that take away may be others. The backward walk ends with log P.
template <typename real, Topology topology, bool frames_run, bool backward, int team_warps>
__device__ void walk_lattice(const WaveLattice<real>& lattice, real* total) {
  const int teams = blockDim.x / (32 * team_warps), team = threadIdx.x / 32 % teams;
  const int role = threadIdx.x / 32 / teams;
  const bool walks = role == 0, brings = role == 1, takes = role == team_warps - 1;
  if (lattice.frames <= 0) {
    if (backward && threadIdx.x == 0) *total = minus_infinity<real>();
    return;
  }
  auto* const memory = dynamic_shared_memory<StripeMemory<real, frames_run>>();
  const int32_t nodes = lattice.frames + 1, stripes = lattice.symbols / kStripe + 1;
  // Passes of equal size end sooner than full ones and a rest.
  const int32_t passes = (stripes + teams - 1) / teams;
  const int32_t stripes_a_pass = (stripes + passes - 1) / passes;
  for (int32_t group = 0; group < stripes; group += stripes_a_pass) {
    const int32_t in_pass = min(stripes_a_pass, stripes - group);
    const int32_t stripe = group + team;
    const bool takes_part = team < in_pass;
    StripeEdges<real> edges{};
    if (team > 0) edges.before = memory[team - 1].edges;
    if (team == 0 && group > 0) edges.in = lattice.edge;
    if (team + 1 == in_pass && stripe + 1 < stripes) edges.out = lattice.edge;
    Walker<real, topology, frames_run, backward> walker(nodes, stripe == 0, memory[team], edges);
    using StripeCarrier = Carrier<real, frames_run, backward>;
    StripeCarrier carrier(lattice, stripe * kStripe, memory[team]);

    // From the period in which the first carrier fetches its first frames to that in which the last
    // one stores its last.
    const int32_t last = (nodes - 1) / kChunk + kLag + kLag * (in_pass - 1);
    int32_t period = -(kLag + StripeCarrier::ahead);
    const auto one_period = [&](auto turn) {
      if (takes_part) {
        const int32_t chunk = period - kLag * team;
        if (walks) walker.walk(chunk);
        if (takes) carrier.take_away(chunk);
        if (brings) carrier.template bring<decltype(turn)::value>(chunk);
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

// Teams of two warps: more find no room in shared memory anyway, and fewer get more registers each.
// Of three warps, which are faster but would have too few registers if they were as many.
template <typename real>
constexpr int kMostTeams = sizeof(real) == 4 ? 10 : 5;
constexpr int kMostTeamsOfThree = 5;
template <typename real, int team_warps>
constexpr int kWaveThreads =
    32 * team_warps * (team_warps == 3 ? kMostTeamsOfThree : kMostTeams<real>);

// How a block for lattices of up to `columns` columns is launched.
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

template <typename real, bool frames_run>
WaveBlock<real> wave_block(int64_t columns, const DeviceLimits& limits) {
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  const size_t team_bytes = sizeof(StripeMemory<real, frames_run>);
  const int64_t fitting = limits.shared_bytes / static_cast<int64_t>(team_bytes);
  const int64_t teams =
      std::max<int64_t>(1, std::min<int64_t>({stripes, fitting, kMostTeams<real>}));
  const int team_warps = sizeof(real) == 4 && teams <= kMostTeamsOfThree ? 3 : 2;
  return {team_warps, static_cast<uint32_t>(32 * team_warps * teams), teams * team_bytes};
}

}  // namespace cuda
}  // namespace pruned_rnnt
