// The recursion over a band of a few columns per frame that never moves back, with the frames of
// many segments at once: a step of it takes long, and a GPU has room for many.
//
// Across a segment of frames the recursion is a linear map of as many numbers as the band has
// columns. A thread has the columns of a frame in its registers and goes along the frames of one
// segment: first from every column alone, which gives the map; then, when the maps have been
// applied one after the other, from what really arrives, and stores it.
//
// Axes: T frames, S columns of the band. States are (S): forward what arrives at the nodes of a
// frame before it emits, backward beta of the nodes of a frame.
#pragma once

#include "cuda/band.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int kDirectionThreads = 128;

// What the threads of one direction share. `most` is at least S.
template <typename real, int most>
struct SegmentMemory {
  static constexpr int kSegments = kDirectionThreads / most;

  Probability<real> map[kSegments][most][most];  // from a column, to a column
  Probability<real> state[kSegments][most];      // with which the walk enters a segment
};

template <typename real, Topology topology, bool backward, int most>
class SegmentWalker {
  using Number = Probability<real>;
  using State = Number[most];

 public:
  __device__ __forceinline__ explicit SegmentWalker(const BandLattice<real>& band) : band_(band) {
    constexpr int all = SegmentMemory<real, most>::kSegments;
    length_ = (band.frames + all - 1) / all;
    segments_ = (band.frames + length_ - 1) / length_;
  }

  // All threads of both directions must call this; `thread` counts those of this one. The backward
  // walk ends with log P.
  __device__ __forceinline__ void run(SegmentMemory<real, most>& memory, int thread,
                                      real* total) const {
    const int segment = thread / most, from = thread % most;
    // The last segment's map is not needed.
    if (segment < segments_ && segment != last_segment() && from < band_.columns) {
      State state;
#pragma unroll
      for (int j = 0; j < most; ++j) state[j] = j == from ? Number::one() : Number::zero();
      walk<false>(segment, state, nullptr);
#pragma unroll
      for (int j = 0; j < most; ++j) memory.map[segment][from][j] = state[j];
    }
    __syncthreads();
    if (thread < 32) enter_segments(memory, thread);
    __syncthreads();
    if (thread >= segments_) return;
    State state;
#pragma unroll
    for (int j = 0; j < most; ++j) state[j] = memory.state[thread][j];
    walk<true>(thread, state, total);
  }

 private:
  struct Frame {
    real px[most], py[most];
    int32_t start;
  };

  __device__ __forceinline__ int32_t last_segment() const { return backward ? 0 : segments_ - 1; }

  // Applies the maps, a lane for each column.
  __device__ __forceinline__ void enter_segments(SegmentMemory<real, most>& memory,
                                                 int lane) const {
    const int column = lane < most ? lane : most - 1;
    // The corner where the walk begins: the first symbol of the first frame, or what comes after
    // the last frame.
    const int32_t last = band_.start[band_.frames - 1];
    const int32_t corner =
        backward ? band_.symbols - last - shift_behind_last(last) : -band_.start[0];
    Number own = corner == lane && lane < band_.columns ? Number::one() : Number::zero();
    for (int32_t i = 0; i < segments_; ++i) {
      const int32_t segment = backward ? segments_ - 1 - i : i;
      if (lane < most) memory.state[segment][lane] = own;
      if (i + 1 == segments_) return;
      Number sum = Number::zero();
      for (int32_t from = 0; from < band_.columns; ++from) {
        sum = sum + own.of_lane(from) * memory.map[segment][from][column];
      }
      sum.normalise();
      own = sum;
    }
  }

  // Columns by which the band would have to move on behind the last frame for the corner to be in
  // it: an emit may lead there.
  __device__ __forceinline__ int32_t shift_behind_last(int32_t start) const {
    return band_.symbols == start + band_.columns ? 1 : 0;
  }

  __device__ __forceinline__ Frame fetch(int32_t t) const {
    Frame frame;
    frame.start = band_.start[t];
    const int64_t row = static_cast<int64_t>(t) * band_.columns;
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j >= band_.columns) break;
      frame.px[j] = band_.px[row + j];
      frame.py[j] = band_.py[row + j];
    }
    return frame;
  }

  // From the state with which the walk enters a segment to that with which it leaves.
  template <bool store>
  __device__ __forceinline__ void walk(int32_t segment, State& state, real* total) const {
    const int32_t begin = segment * length_, end = min(begin + length_, band_.frames);
    int32_t t = backward ? end - 1 : begin;
    Frame next = fetch(t);
    // Where the band begins in the frame that the walk back comes from.
    int32_t behind = next.start;
    if (backward)
      behind = end < band_.frames ? band_.start[end] : behind + shift_behind_last(behind);
    for (int32_t left = end - begin; left > 0; --left) {
      const Frame frame = next;
      const int32_t after = backward ? t - 1 : t + 1;
      if (left > 1) {
        next = fetch(after);
      } else if (!backward) {
        next.start = after < band_.frames ? band_.start[after] : frame.start;
      }
      Number px[most], py[most];
      arcs(frame, t, px, py);
      if constexpr (backward) {
        step_back(state, px, py, behind - frame.start);
        behind = frame.start;
        if (store) store_values(state, t);
        if (store && t == 0) store_total(state, frame.start, total);
      } else {
        Number alpha[most];
        emit_inside(state, px, alpha);
        if (store) store_values(alpha, t);
        step_on(alpha, px, py, next.start - frame.start, state);
      }
#pragma unroll
      for (int j = 0; j < most; ++j) state[j].normalise();
      t = after;
    }
  }

  __device__ __forceinline__ void arcs(const Frame& frame, int32_t t, State& px, State& py) const {
    const bool may_emit = topology != Topology::kRna || t + 1 < band_.frames;
    const real delay = band_.delay(t);
#pragma unroll
    for (int j = 0; j < most; ++j) {
      const int32_t u = frame.start + j;
      const bool valid = j < band_.columns && u >= 0 && u <= band_.symbols;
      px[j] = valid && may_emit && u < band_.symbols ? Number::exp(to_log_zero(frame.px[j] + delay))
                                                     : Number::zero();
      py[j] = valid ? Number::exp(to_log_zero(frame.py[j])) : Number::zero();
    }
  }

  // alpha of a frame by what arrives at it.
  __device__ __forceinline__ static void emit_inside(const State& state, const State& px,
                                                     State& alpha) {
#pragma unroll
    for (int j = 0; j < most; ++j) {
      alpha[j] = state[j];
      if (topology == Topology::kRegular && j > 0) alpha[j] = alpha[j] + alpha[j - 1] * px[j - 1];
    }
  }

  // What arrives at the next frame, where the band is `shift` columns further.
  __device__ __forceinline__ static void step_on(const State& alpha, const State& px,
                                                 const State& py, int32_t shift, State& state) {
    Number arriving[most + 1];
#pragma unroll
    for (int j = 0; j <= most; ++j) {
      Number emitted = Number::zero();
      if (topology != Topology::kRegular && j > 0) emitted = alpha[j - 1] * px[j - 1];
      if (j == most) {
        // No blank is there.
        arriving[j] = topology == Topology::kConstrained ? Number::zero() : emitted;
      } else if (topology == Topology::kConstrained) {
        arriving[j] = (alpha[j] + emitted) * py[j];
      } else {
        arriving[j] = alpha[j] * py[j];
        if (topology != Topology::kRegular) arriving[j] = arriving[j] + emitted;
      }
    }
    for (int32_t i = min(shift, most + 1); i > 0; --i) {
#pragma unroll
      for (int j = 0; j < most; ++j) arriving[j] = arriving[j + 1];
      arriving[most] = Number::zero();
    }
#pragma unroll
    for (int j = 0; j < most; ++j) state[j] = arriving[j];
  }

  // beta of a frame by that of the one behind, where the band is `shift` columns further.
  __device__ __forceinline__ static void step_back(State& state, const State& px, const State& py,
                                                   int32_t shift) {
    Number behind[most + 1];
#pragma unroll
    for (int j = 0; j < most; ++j) behind[j] = state[j];
    behind[most] = Number::zero();
    for (int32_t i = min(shift, most + 1); i > 0; --i) {
#pragma unroll
      for (int j = most; j > 0; --j) behind[j] = behind[j - 1];
      behind[0] = Number::zero();
    }
#pragma unroll
    for (int j = most - 1; j >= 0; --j) {
      const Number stayed = behind[j] * py[j];
      Number emitted = Number::zero();
      if (topology == Topology::kRegular) {
        if (j + 1 < most) emitted = state[j + 1] * px[j];
      } else if (topology == Topology::kConstrained) {
        if (j + 1 < most) emitted = behind[j + 1] * py[j + 1] * px[j];
      } else {
        emitted = behind[j + 1] * px[j];
      }
      state[j] = stayed + emitted;
    }
  }

  __device__ __forceinline__ void store_values(const State& values, int32_t t) const {
    const int64_t row = static_cast<int64_t>(t) * band_.columns;
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j < band_.columns) band_.values[row + j] = from_log_zero(values[j].log());
    }
  }

  __device__ __forceinline__ void store_total(const State& beta, int32_t start, real* total) const {
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (start + j == 0 && j < band_.columns) *total = from_log_zero(beta[j].log());
    }
  }

  const BandLattice<real>& band_;
  int32_t length_, segments_;  // frames of a segment, and how many there are
};

}  // namespace cuda
}  // namespace pruned_rnnt
