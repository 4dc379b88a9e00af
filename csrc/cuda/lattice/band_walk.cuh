// The recursion over a band that never moves back (formulas: halves.cuh): one thread for each
// column of the band, all frames in order. Work and memory do not depend on the number of symbols.
//
//   u 3  .  .  5     `regular`, S = 2; a number is the step that computes the node, its diagonal
//     2  .  3  4     t + u. Column j of frame t is symbol u = start(t) + j and meets every diagonal
//     1  1  2  .     at most once, in order, so that all threads step along diagonals together and
//     0  0  .  .     need only the last values of other threads.
//        0  1  2  t
//
// The other topologies need the neighbouring frame only, and step along frames. Walks that go back
// count columns from the last one. The early walks (halves.cuh) also take frame M, whose nodes end
// the sums and begin the masses. Each thread copies the inputs of its frames some frames ahead into
// a small ring in shared memory.
//
// Axes: T frames, S columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/lattice/band.cuh"

namespace pruned_rnnt::cuda {

// Frames of a thread's ring: enough to hide the latency of memory.
template <typename real>
constexpr int kBandRing = sizeof(real) == 4 ? 8 : 4;

// Shared memory of a block with `threads` threads: rings of a thread's slots lie `threads` apart.
template <typename real>
struct BandMemory {
  // Of each thread: two buffers of values for other threads, and a ring.
  static constexpr size_t kThreadBytes =
      4 * sizeof(double) + kBandRing<real> * (2 * sizeof(real) + sizeof(int32_t));

  double* exchange;
  real *first, *second;
  int32_t* starts;

  RNNT_DEVICE static BandMemory make() {
    const int threads = blockDim.x;
    BandMemory memory;
    memory.exchange = dynamic_shared_memory<double>();
    memory.first = reinterpret_cast<real*>(memory.exchange + 4 * threads);
    memory.second = memory.first + kBandRing<real> * threads;
    memory.starts = reinterpret_cast<int32_t*>(memory.second + kBandRing<real> * threads);
    return memory;
  }
};

// Exchanges two numbers of each thread of a block, through 4 * blockDim.x slots.
template <typename Number>
class BandExchange {
  static_assert(sizeof(Number) == sizeof(double));

 public:
  RNNT_DEVICE explicit BandExchange(double* memory) : memory_(reinterpret_cast<Number*>(memory)) {}
  RNNT_DEVICE void offer(const Number& first, const Number& second) {
    // With two buffers in turn, one barrier separates writes from reads in both directions.
    turn_ ^= 1;
    buffer()[threadIdx.x] = first;
    buffer()[blockDim.x + threadIdx.x] = second;
    __syncthreads();
  }
  // The number of thread `thread` of 0..count-1; 0 for others.
  RNNT_DEVICE Number first_of(int thread, int count) const {
    return thread >= 0 && thread < count ? buffer()[thread] : Number::zero();
  }
  RNNT_DEVICE Number second_of(int thread, int count) const {
    return thread >= 0 && thread < count ? buffer()[blockDim.x + thread] : Number::zero();
  }

 private:
  RNNT_DEVICE Number* buffer() const { return memory_ + turn_ * 2 * blockDim.x; }
  Number* memory_;
  int turn_ = 0;
};

template <typename real>
struct WalkNode {
  NodePair<real> numbers;  // px and py, or the share
  int32_t u, shift;        // shift: columns by which the band moves on from the frame before
};

// Reads the frames of one column in the order of the walk.
template <typename real, Walk walk>
class ColumnReader {
  static constexpr bool kBack = goes_back(walk), kSums = makes_sums(walk);

 public:
  RNNT_DEVICE ColumnReader(const BandLattice<real>& band, int32_t column,
                           const BandMemory<real>& memory, const real* cut_share)
      : band_(band),
        column_(kBack ? band.columns - 1 - column : column),
        cut_(cut_of(band.frames)),
        memory_(memory),
        cut_share_(cut_share) {
    if (column < 0 || column >= band.columns) return;
    for (int32_t f = 0; f < kBandRing<real> - 1; ++f) request(f);
  }

  // Starts the copies of a frame some frames after f.
  RNNT_DEVICE void request_after(int32_t f) { request(f + kBandRing<real> - 1); }

  RNNT_DEVICE int32_t frame(int32_t f) const {
    if (walk == Walk::kEarlySums) return f;
    if (walk == Walk::kLateSums) return band_.frames - 1 - f;
    return walk == Walk::kEarlyMasses ? cut_ - f : cut_ + f;
  }
  // Frames of the walk.
  RNNT_DEVICE int32_t count() const { return is_early(walk) ? cut_ + 1 : band_.frames - cut_; }
  RNNT_DEVICE int32_t cut() const { return cut_; }
  RNNT_DEVICE int32_t column() const { return column_; }
  RNNT_DEVICE int64_t row(int32_t f) const { return int64_t(frame(f)) * band_.columns + column_; }

  // The inputs of frame f; frames must be read in order.
  RNNT_DEVICE WalkNode<real> read(int32_t f) {
    const int slot = slot_of(f);
    const int32_t start = memory_.starts[slot];
    WalkNode<real> node{};
    node.u = start + column_;
    node.shift = f == 0 ? 0 : (kBack ? start_before_ - start : start - start_before_);
    start_before_ = start;
    node.numbers = {memory_.first[slot], kSums ? memory_.second[slot] : real(0)};
    return node;
  }

 private:
  RNNT_DEVICE static int slot_of(int32_t f) {
    return f % kBandRing<real> * blockDim.x + threadIdx.x;
  }
  RNNT_DEVICE void request(int32_t f) {
    if (f >= count()) return;
    const int slot = slot_of(f);
    if constexpr (kSums) {
      copy_async(memory_.first + slot, band_.px + row(f));
      copy_async(memory_.second + slot, band_.py + row(f));
    } else {
      const real* share = (is_early(walk) ? band_.gy : band_.gx) + row(f);
      if (is_early(walk) && f == 0) share = cut_share_ + column_;
      copy_async(memory_.first + slot, share);
    }
    copy_async(memory_.starts + slot, band_.start + frame(f));
  }

  const BandLattice<real>& band_;
  const int32_t column_, cut_;
  const BandMemory<real> memory_;
  const real* const cut_share_;
  int32_t start_before_ = 0;
};

// One walk of one column, in steps that all threads of the block take together.
template <typename real, Topology topology, Walk walk>
class BandWalk {
  using Number = std::conditional_t<makes_sums(walk), Probability<real>, Occupancy>;
  static constexpr bool kByDiagonal = topology == Topology::kRegular;

 public:
  // log_p: of masses.
  RNNT_DEVICE BandWalk(const BandLattice<real>& band, const BandMemory<real>& memory,
                       const CutMemory<real>& cut, double log_p)
      : band_(band),
        column_(threadIdx.x),
        cut_(cut),
        log_p_(log_p),
        exchange_(memory.exchange),
        reader_(band, column_, memory, cut.share()) {}

  __device__ void run() {
    constexpr int ahead = kBandRing<real> - 2;
    const int32_t S = band_.columns, frames = reader_.count();
    const int32_t moved =
        abs(band_.start[reader_.frame(frames - 1)] - band_.start[reader_.frame(0)]);
    const int32_t span = kByDiagonal ? moved + S - 1 : 0;
    commit_copies();
    wait_copies<0>();
    // The next frame, its diagonal, and its inputs.
    int32_t f = column_ < S ? 0 : frames;
    int32_t diagonal = kByDiagonal ? column_ : 0;
    WalkNode<real> next{};
    if (f < frames) next = reader_.read(0);
    for (int32_t k = 0; k < frames + span; ++k) {
      const bool active = f < frames && diagonal == k;
      step(f, next, active);
      if (active) reader_.request_after(f);
      commit_copies();
      wait_copies<ahead>();
      if (active && ++f < frames) {
        next = reader_.read(f);
        diagonal += kByDiagonal ? 1 + next.shift : 1;
      }
    }
    wait_copies<0>();
  }

 private:
  // Frame f of this column, if it is `active`; all threads must call this.
  RNNT_DEVICE void step(int32_t f, const WalkNode<real>& node, bool active) {
    // The early sums of `constrained` pass through their own column, whose blank they need.
    constexpr bool by_own = topology == Topology::kConstrained && walk == Walk::kEarlySums;
    const int32_t S = band_.columns, own = column_ + node.shift;
    exchange_.offer(by_blank_, by_emit_);
    Number stayed = exchange_.first_of(own, S);
    Number emitted = exchange_.second_of(kByDiagonal ? column_ - 1 : by_own ? own : own - 1, S);
    if (f == 0) {
      stayed = beginning(node.u);
      if (!kByDiagonal) emitted = Number::zero();
      // The last frame may be left by an emit from the symbol before the last.
      if constexpr (walk == Walk::kLateSums && topology == Topology::kModified) {
        if (node.u + 1 == band_.symbols) emitted = Number::one();
      }
    }
    if constexpr (walk == Walk::kEarlySums) {
      sum_early(f, node, active, stayed, emitted);
    } else if constexpr (walk == Walk::kLateSums) {
      sum_late(f, node, active, stayed, emitted);
    } else if constexpr (walk == Walk::kEarlyMasses) {
      // The blank is also part of the emit that leads to this column's next frame.
      const double used =
          topology == Topology::kConstrained ? exchange_.second_of(own, S).value : 0;
      share_early(f, node, active, stayed, emitted, used);
    } else {
      share_late(f, node, active, stayed + emitted);
    }
  }

  // The value with which the walk enters the nodes of its first frame.
  RNNT_DEVICE Number beginning(int32_t u) const {
    if constexpr (makes_sums(walk)) {
      return u == (walk == Walk::kLateSums ? band_.symbols : 0) ? Number::one() : Number::zero();
    } else {
      return cut_mass(cut_, reader_.column(), log_p_);
    }
  }

  // alpha of a node, from the values of its sources.
  RNNT_DEVICE void sum_early(int32_t f, const WalkNode<real>& node, bool active,
                             const Number& stayed, const Number& emitted) {
    const bool at_cut = reader_.frame(f) == reader_.cut();
    const NodePair<real> arcs = band_.template arcs<topology>(
        reader_.frame(f), node.u, node.numbers.first, node.numbers.second);
    real share;
    Number alpha = Number::add_shared(emitted, stayed, share);
    alpha.normalise();
    const Number py = Number::exp(arcs.second);
    // An arc from the cut belongs to the late half.
    Number emit = at_cut ? Number::zero() : alpha * Number::exp(arcs.first);
    if (topology == Topology::kConstrained) {
      exchange_.offer(emit, Number::zero());
      emit = exchange_.first_of(column_ - 1, band_.columns) * py;
    }
    if (!active) return;
    if (at_cut) {
      cut_.save(true, reader_.column(), alpha);
      cut_.share()[reader_.column()] = share;
    } else {
      band_.gy[reader_.row(f)] = share;
    }
    by_blank_ = alpha * py;
    by_emit_ = emit;
    by_blank_.normalise();
    by_emit_.normalise();
  }

  // beta of a node, from those of its targets.
  RNNT_DEVICE void sum_late(int32_t f, const WalkNode<real>& node, bool active, Number stayed,
                            Number emitted) {
    const NodePair<real> arcs = band_.template arcs<topology>(
        reader_.frame(f), node.u, node.numbers.first, node.numbers.second);
    stayed = stayed * Number::exp(arcs.second);
    if (topology == Topology::kConstrained) {
      // An emit needs the blank of its new column in the same frame.
      exchange_.offer(stayed, Number::zero());
      emitted = exchange_.first_of(column_ - 1, band_.columns);
    }
    real share;
    Number beta = Number::add_shared(emitted * Number::exp(arcs.first), stayed, share);
    beta.normalise();
    if (!active) return;
    band_.gx[reader_.row(f)] = share;
    by_blank_ = by_emit_ = beta;
    if (reader_.frame(f) == reader_.cut()) cut_.save(false, reader_.column(), beta);
  }

  // Occupancies of a node's arcs, from their targets.
  RNNT_DEVICE void share_early(int32_t f, const WalkNode<real>& node, bool active,
                               const Number& stayed, const Number& emitted, double used) {
    if (!active) return;
    if (f > 0) {
      band_.gx[reader_.row(f)] = static_cast<real>(emitted.value);
      band_.gy[reader_.row(f)] = static_cast<real>(stayed.value + used);
    }
    const Mass mass = split_mass((stayed + emitted).value, node.numbers.first);
    by_blank_.value = mass.blank;
    by_emit_.value = mass.emit;
  }

  // The same, from the mass that arrives.
  RNNT_DEVICE void share_late(int32_t f, const WalkNode<real>& node, bool active,
                              const Number& arriving) {
    const Mass mass = split_mass(arriving.value, node.numbers.first);
    double used = 0;
    if (topology == Topology::kConstrained) {
      exchange_.offer(Number{mass.emit}, Number::zero());
      used = exchange_.first_of(column_ - 1, band_.columns).value;
    }
    if (!active) return;
    band_.gx[reader_.row(f)] = static_cast<real>(mass.emit);
    band_.gy[reader_.row(f)] = static_cast<real>(mass.blank + used);
    by_blank_.value = mass.blank;
    by_emit_.value = mass.emit;
  }

  const BandLattice<real>& band_;
  const int32_t column_;
  const CutMemory<real>& cut_;
  const double log_p_;
  BandExchange<Number> exchange_;
  ColumnReader<real, walk> reader_;
  // Values of this thread's last node along its blank and its emit.
  Number by_blank_ = Number::zero(), by_emit_ = Number::zero();
};

}  // namespace pruned_rnnt::cuda
