// The recursion over a band of a few columns, for many segments of frames at the same time:
//
//   beta(t,j) = blank(t,j) beta(t+1, u) + emit(t,j) beta(target of the emit), u = start(t) + j
//   beta(segment's first frame) = map * beta(frame behind the segment)        map (S,S)
//
//   frames      0 .. L-1 | L .. 2L-1 | ...          L frames in a segment
//   backward     beta  <-|-  map  <--|- beta(T) = 1 at the last symbol
//   forward     1 at u=0 ->|- map  -->|- mass
//
// A thread holds the columns of a frame in registers and walks one segment: first from every column
// alone, which gives a column of the map; then, after the maps have been applied one after the
// other, from the values that really arrive, and stores the results: backward the arc shares,
// forward the occupancies. One step has a long latency, and a GPU has room for many walks: S 5, N
// 30, T 437 take 0.040 ms instead of 0.122 with all frames in order.
//
// Axes: T frames, S columns of the band. States are (S): backward beta of the nodes of a frame,
// forward the mass that arrives at the nodes of a frame before it emits.
#pragma once

#include "cuda/lattice/topology.cuh"

namespace pruned_rnnt::cuda {

constexpr int kSegmentThreads = 256;

// One utterance: column j of frame t is symbol u = start(t) + j.
template <typename real>
struct BandLattice {
  const real *px, *py;   // rows of S
  const int32_t* start;  // of every frame
  real* gx;              // arc shares between the two walks
  real* gy;
  int32_t frames, symbols, columns;
  real delay_penalty;

  // Added to px at frame t.
  RNNT_DEVICE real delay(int32_t t) const {
    const real middle = static_cast<real>(frames - 1) / 2;
    return delay_penalty == 0 ? real(0) : delay_penalty * (middle - static_cast<real>(t));
  }

  // The arcs of a node, from px and py of its row; log 0 if there is no arc.
  template <Topology topology>
  RNNT_DEVICE NodePair<real> arcs(int32_t t, int32_t u, real px_here, real py_here) const {
    const bool valid = u >= 0 && u <= symbols;
    const bool emits = valid && u < symbols && (topology != Topology::kRna || t + 1 < frames);
    return {emits ? to_log_zero(px_here + delay(t)) : kLogZero<real>,
            valid ? to_log_zero(py_here) : kLogZero<real>};
  }
};

// `most` is at least S. A number is a Probability in the backward walk and an Occupancy in the
// forward walk.
template <typename real, int most>
struct SegmentMemory {
  static constexpr int kSegments = kSegmentThreads / most;

  template <typename Number>
  struct Numbers {
    Number map[kSegments][most][most];  // from a column, to a column
    Number state[kSegments][most];      // as the walk enters a segment
  };
  union {
    Numbers<Probability<real>> back;
    Numbers<Occupancy> forward;
  };
};

template <typename real, Topology topology, int most>
class SegmentWalk {
  using Memory = SegmentMemory<real, most>;
  using Beta = Probability<real>;

 public:
  RNNT_DEVICE explicit SegmentWalk(const BandLattice<real>& band)
      : band_(band),
        length_((band.frames + Memory::kSegments - 1) / Memory::kSegments),
        segments_((band.frames + length_ - 1) / length_),
        segment_(threadIdx.x / most),
        column_(threadIdx.x % most) {}

  // Both walks, by all threads of the block. Writes log P to `total` in shared memory, which must
  // be -inf before; if it stays -inf, gx is undefined.
  RNNT_DEVICE void run(Memory& memory, real* total) const {
    const int32_t last = band_.start[band_.frames - 1];
    // Column of the end node behind the last frame.
    const int32_t end = band_.symbols - last - shift_behind_last(last);
    both_times<true, Beta>(memory.back, end, [&](Beta(&state)[most], auto stores) {
      walk_back<stores.value>(state, total);
    });
    __syncthreads();
    if (*total == minus_infinity<real>()) return;
    both_times<false, Occupancy>(
        memory.forward, -band_.start[0],
        [&](Occupancy(&state)[most], auto stores) { walk_forward<stores.value>(state); });
  }

 private:
  struct Frame {
    NodePair<real> nodes[most];  // px and py
    int32_t start;
  };

  // Calls walk(state, whether to store) from each column alone, then from the values that arrive.
  // corner: the column where the walk begins.
  template <bool backward, typename Number, typename Numbers, typename Walk>
  RNNT_DEVICE void both_times(Numbers& numbers, int32_t corner, Walk&& walk) const {
    Number state[most];
    // The last segment's map is not needed.
    const int32_t last_segment = backward ? 0 : segments_ - 1;
    if (segment_ < segments_ && segment_ != last_segment && column_ < band_.columns) {
#pragma unroll
      for (int j = 0; j < most; ++j) state[j] = j == column_ ? Number::one() : Number::zero();
      walk(state, std::false_type());
#pragma unroll
      for (int j = 0; j < most; ++j) numbers.map[segment_][column_][j] = state[j];
    }
    __syncthreads();
    if (threadIdx.x < 32) enter_segments<backward, Number>(numbers, corner);
    __syncthreads();
    if (segment_ >= segments_ || column_ > 0) return;
#pragma unroll
    for (int j = 0; j < most; ++j) state[j] = numbers.state[segment_][j];
    walk(state, std::true_type());
  }

  // Applies the maps one after the other, a lane for each column.
  template <bool backward, typename Number, typename Numbers>
  RNNT_DEVICE void enter_segments(Numbers& numbers, int32_t corner) const {
    const int lane = threadIdx.x;
    const int column = lane < most ? lane : most - 1;
    Number own = corner == lane && lane < band_.columns ? Number::one() : Number::zero();
    for (int32_t i = 0; i < segments_; ++i) {
      const int32_t segment = backward ? segments_ - 1 - i : i;
      if (lane < most) numbers.state[segment][lane] = own;
      if (i + 1 == segments_) return;
      Number sum = Number::zero();
      for (int32_t from = 0; from < band_.columns; ++from) {
        sum = sum + own.of_lane(from) * numbers.map[segment][from][column];
      }
      sum.normalise();
      own = sum;
    }
  }

  // Columns by which the band must move behind the last frame to hold the end node, to which an
  // emit may lead.
  RNNT_DEVICE int32_t shift_behind_last(int32_t start) const {
    return band_.symbols == start + band_.columns ? 1 : 0;
  }
  RNNT_DEVICE int64_t row(int32_t t) const { return int64_t(t) * band_.columns; }

  // px and py of frame t, or the arc shares.
  template <bool arcs>
  RNNT_DEVICE Frame fetch(int32_t t) const {
    Frame frame;
    frame.start = band_.start[t];
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j >= band_.columns) break;
      frame.nodes[j].first = (arcs ? band_.px : band_.gx)[row(t) + j];
      if (arcs) frame.nodes[j].second = band_.py[row(t) + j];
    }
    return frame;
  }

  // From beta of the frame behind the segment to that of its first frame; may store the shares.
  template <bool stores>
  RNNT_DEVICE void walk_back(Beta (&state)[most], real* total) const {
    const int32_t begin = segment_ * length_, end = min(begin + length_, band_.frames);
    Frame next = fetch<true>(end - 1);
    // Start of the band in the frame behind.
    int32_t behind =
        end < band_.frames ? band_.start[end] : next.start + shift_behind_last(next.start);
    for (int32_t t = end - 1; t >= begin; --t) {
      const Frame frame = next;
      if (t > begin) next = fetch<true>(t - 1);
      real shares[most];
      step_back(state, frame, t, behind - frame.start, shares);
      behind = frame.start;
#pragma unroll
      for (int j = 0; j < most; ++j) {
        if (!stores || j >= band_.columns) break;
        band_.gx[row(t) + j] = shares[j];
        if (t == 0 && frame.start + j == 0) *total = from_log_zero(state[j].log());
      }
    }
  }

  // beta of frame t from that of the frame behind, whose band starts `shift` columns later, or
  // earlier if that is negative.
  RNNT_DEVICE void step_back(Beta (&state)[most], const Frame& frame, int32_t t, int32_t shift,
                             real (&shares)[most]) const {
    Beta behind[most + 1];
#pragma unroll
    for (int j = 0; j < most; ++j) behind[j] = state[j];
    behind[most] = Beta::zero();
    for (int32_t i = min(shift, most + 1); i > 0; --i) {
#pragma unroll
      for (int j = most; j > 0; --j) behind[j] = behind[j - 1];
      behind[0] = Beta::zero();
    }
    for (int32_t i = max(shift, -most); i < 0; ++i) {
#pragma unroll
      for (int j = 0; j < most; ++j) behind[j] = behind[j + 1];
    }
    // The blank of the column above is part of an emit of `constrained`.
    Beta stayed_above = Beta::zero(), above = Beta::zero();
#pragma unroll
    for (int j = most - 1; j >= 0; --j) {
      Beta stayed = Beta::zero(), emitted = Beta::zero();
      if (j < band_.columns) {
        const NodePair<real> arcs = band_.template arcs<topology>(
            t, frame.start + j, frame.nodes[j].first, frame.nodes[j].second);
        stayed = behind[j] * Beta::exp(arcs.second);
        const Beta target = topology == Topology::kRegular       ? above
                            : topology == Topology::kConstrained ? stayed_above
                                                                 : behind[j + 1];
        emitted = target * Beta::exp(arcs.first);
      }
      above = Beta::add_shared(emitted, stayed, shares[j]);
      above.normalise();
      stayed_above = stayed;
      state[j] = above;
    }
  }

  // From the mass that arrives at the segment's first frame to that behind it; may store
  // occupancies.
  template <bool stores>
  RNNT_DEVICE void walk_forward(Occupancy (&state)[most]) const {
    const int32_t begin = segment_ * length_, end = min(begin + length_, band_.frames);
    Frame next = fetch<false>(begin);
    for (int32_t t = begin; t < end; ++t) {
      const Frame frame = next;
      if (t + 1 < end) {
        next = fetch<false>(t + 1);
      } else {
        next.start = end < band_.frames ? band_.start[end] : frame.start;
      }
      NodePair<real> occupancies[most];
      step_forward(state, frame, next.start - frame.start, occupancies);
#pragma unroll
      for (int j = 0; j < most; ++j) {
        if (!stores || j >= band_.columns) break;
        band_.gx[row(t) + j] = occupancies[j].first;
        band_.gy[row(t) + j] = occupancies[j].second;
      }
    }
  }

  // The mass that arrives at the next frame, whose band starts `shift` columns later or earlier.
  RNNT_DEVICE void step_forward(Occupancy (&state)[most], const Frame& frame, int32_t shift,
                                NodePair<real> (&occupancies)[most]) const {
    double leaving[most + 1];
    double emit_below = 0;
#pragma unroll
    for (int j = 0; j < most; ++j) {
      Mass mass{0, 0};
      if (j < band_.columns) {
        const double arriving = topology == Topology::kRegular ? emit_below : 0;
        mass = split_mass(state[j].value + arriving, frame.nodes[j].first);
      }
      leaving[j] = mass.blank + (topology == Topology::kRegular ? 0 : emit_below);
      const double used = topology == Topology::kConstrained ? emit_below : 0;
      occupancies[j] = {static_cast<real>(mass.emit), static_cast<real>(mass.blank + used)};
      emit_below = mass.emit;
    }
    leaving[most] = topology == Topology::kRegular ? 0 : emit_below;
    for (int32_t i = min(shift, most + 1); i > 0; --i) {
#pragma unroll
      for (int j = 0; j < most; ++j) leaving[j] = leaving[j + 1];
      leaving[most] = 0;
    }
    for (int32_t i = max(shift, -most); i < 0; ++i) {
#pragma unroll
      for (int j = most; j > 0; --j) leaving[j] = leaving[j - 1];
      leaving[0] = 0;
    }
#pragma unroll
    for (int j = 0; j < most; ++j) state[j].value = leaving[j];
  }

  const BandLattice<real>& band_;
  const int32_t length_, segments_;  // frames of a segment, and how many there are
  const int32_t segment_, column_;   // this thread's
};

}  // namespace pruned_rnnt::cuda
