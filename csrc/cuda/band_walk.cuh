// The recursion over a band of columns per frame: one thread a column of the band, all frames in
// order. Work and memory do not depend on the number of symbols.
//
// The band moves: column j of frame t is symbol u = start(t) + j. With `regular`, node (t,u) needs
// (t-1,u) and (t,u-1), both on the diagonal t + u - 1; column j meets the diagonals in order and
// every diagonal at most once, so that all threads step along diagonals together and find what they
// need in the last value of another thread. The other topologies need the frame before only, and
// step along frames.
// px, py and start come through a small ring of each thread's own in shared memory, copied some
// frames ahead.
//
// Axes: T frames, S columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/band.cuh"

namespace pruned_rnnt {
namespace cuda {

// Frames of a thread's ring: enough to hide the way from memory behind the steps.
template <typename real>
constexpr int kBandRing = sizeof(real) == 4 ? 8 : 4;

// What the threads of a block hand to each other, through 4 * blockDim.x numbers of shared memory.
template <typename real>
class BandExchange {
 public:
  __device__ __forceinline__ explicit BandExchange(real* memory) : memory_(memory) {}
  __device__ __forceinline__ void offer(real first, real second) {
    // Two buffers take turns, so that one barrier separates writing from reading both ways.
    turn_ ^= 1;
    buffer()[threadIdx.x] = first;
    buffer()[blockDim.x + threadIdx.x] = second;
    __syncthreads();
  }
  __device__ __forceinline__ real first_of(int thread) { return buffer()[thread]; }
  __device__ __forceinline__ real second_of(int thread) { return buffer()[blockDim.x + thread]; }

 private:
  __device__ __forceinline__ real* buffer() { return memory_ + turn_ * 2 * blockDim.x; }
  real* memory_;
  int turn_ = 0;
};

template <typename real>
struct BandStep {
  real px, py;
  int32_t u, shift;  // shift: columns by which the band moves on from the frame before
};

// Reads the frames of one column in the order of the walk.
template <typename real, bool backward>
class ColumnReader {
 public:
  // `memory` and `starts` are this thread's, with `stride` elements from one slot to the next.
  __device__ __forceinline__ ColumnReader(const BandLattice<real>& band, int32_t column,
                                          real* memory, int32_t* starts, int stride)
      : band_(band),
        column_(backward ? band.columns - 1 - column : column),
        px_(memory),
        py_(memory + kBandRing<real> * stride),
        starts_(starts),
        stride_(stride) {
    if (column < 0 || column >= band.columns) return;
    for (int32_t f = 0; f < kBandRing<real> - 1; ++f) request(f);
  }

  // Copies what is needed some frames after f.
  __device__ __forceinline__ void request_after(int32_t f) { request(f + kBandRing<real> - 1); }

  __device__ __forceinline__ int64_t row(int32_t f) const {
    return static_cast<int64_t>(frame(f)) * band_.columns + column_;
  }

  // What was requested for frame f; frames must be read in order.
  __device__ __forceinline__ BandStep<real> read(int32_t f) {
    const int slot = f % kBandRing<real> * stride_;
    BandStep<real> step;
    const int32_t start = starts_[slot];
    step.u = start + column_;
    step.shift = f == 0 ? 0 : (backward ? start_before_ - start : start - start_before_);
    start_before_ = start;
    const real delay = band_.delay(frame(f));
    const bool valid = step.u >= 0 && step.u <= band_.symbols;
    step.px = valid && step.u < band_.symbols ? to_log_zero(px_[slot] + delay) : kLogZero<real>;
    step.py = valid ? to_log_zero(py_[slot]) : kLogZero<real>;
    return step;
  }

 private:
  __device__ __forceinline__ int32_t frame(int32_t f) const {
    return backward ? band_.frames - 1 - f : f;
  }
  __device__ __forceinline__ void request(int32_t f) {
    if (f >= band_.frames) return;
    const int slot = f % kBandRing<real> * stride_;
    copy_async(px_ + slot, band_.px + row(f));
    copy_async(py_ + slot, band_.py + row(f));
    copy_async(starts_ + slot, band_.start + frame(f));
  }

  const BandLattice<real>& band_;
  const int32_t column_;
  real *px_, *py_;
  int32_t* starts_;
  const int stride_;
  int32_t start_before_ = 0;
};

// Writes alpha or beta of all nodes. Returns beta(0,0), or kLogZero, of which the thread that has
// this node gets the former. start must not decrease.
template <typename real, Topology topology, bool backward>
__device__ real walk_band(const BandLattice<real>& band, int32_t column,
                          BandExchange<real> exchange, ColumnReader<real, backward> reader) {
  constexpr bool by_diagonal = topology == Topology::kRegular;
  constexpr int ahead = kBandRing<real> - 2;
  const int32_t S = band.columns, frames = band.frames;
  const int32_t span = by_diagonal ? band.start[frames - 1] - band.start[0] + S - 1 : 0;
  commit_copies();
  wait_copies<0>();
  // The frame to do next, the diagonal on which it comes, and what it needs.
  int32_t f = column < S ? 0 : frames;
  int32_t diagonal = by_diagonal ? column : 0;
  BandStep<real> next{kLogZero<real>, kLogZero<real>, 0, 0};
  if (f < frames) next = reader.read(0);
  real blank_out = kLogZero<real>, symbol_out = kLogZero<real>, corner = kLogZero<real>;
  for (int32_t k = 0; k < frames + span; ++k) {
    const bool active = f < frames && diagonal == k;
    const int32_t own = column + next.shift;
    const int32_t left =
        topology == Topology::kModified || topology == Topology::kRna ? own - 1 : column - 1;
    const auto clamped = [&](int32_t thread) { return max(0, min(thread, S - 1)); };
    const auto inside = [&](int32_t thread) { return thread >= 0 && thread < S; };

    exchange.offer(blank_out, symbol_out);
    real stayed = exchange.first_of(clamped(own));
    real arriving = exchange.second_of(clamped(left));
    if (!inside(own)) stayed = kLogZero<real>;
    if (!inside(left)) arriving = kLogZero<real>;
    if (f == 0) {
      const bool begins = next.u == (backward ? band.symbols : 0);
      stayed = begins ? real(0) : kLogZero<real>;
      if (!by_diagonal) {
        const bool symbol_begins =
            backward && topology == Topology::kModified && next.u + 1 == band.symbols;
        arriving = symbol_begins ? real(0) : kLogZero<real>;
      }
    }
    real value, blank_next, symbol_next = kLogZero<real>;
    if (topology == Topology::kConstrained) {
      // A symbol needs the blank of its new column in the same frame.
      const real through_blank = stayed + next.py;
      exchange.offer(backward ? through_blank : stayed + next.px, real(0));
      arriving = exchange.first_of(clamped(column - 1));
      if (column == 0) arriving = kLogZero<real>;
      value = backward ? log_add(through_blank, arriving + next.px) : stayed;
      blank_next = backward ? value : log_add(stayed, arriving) + next.py;
    } else {
      value = backward ? log_add(stayed + next.py, arriving + next.px) : log_add(stayed, arriving);
      blank_next = backward ? value : value + next.py;
      symbol_next = backward ? value : value + next.px;
    }
    if (active) {
      const bool valid = next.u >= 0 && next.u <= band.symbols;
      band.values[reader.row(f)] = valid ? from_log_zero(value) : minus_infinity<real>();
      if (backward && f == frames - 1 && next.u == 0) corner = value;
      blank_out = blank_next;
      symbol_out = symbol_next;
      reader.request_after(f);
    }
    commit_copies();
    wait_copies<ahead>();
    if (active && ++f < frames) {
      next = reader.read(f);
      diagonal += by_diagonal ? 1 + next.shift : 1;
    }
  }
  wait_copies<0>();
  return corner;
}

// Bytes of shared memory for each thread of walk_wide_band.
template <typename real>
constexpr size_t kBandBytes =
    (2 * kBandRing<real> + 4) * sizeof(real) + kBandRing<real> * sizeof(int32_t);

// The same by a block with a thread for each column.
template <typename real, Topology topology, bool backward>
__device__ real walk_wide_band(const BandLattice<real>& band) {
  const int thread = threadIdx.x, threads = blockDim.x;
  real* const memory = dynamic_shared_memory<real>();
  real* const ring = memory + 4 * threads;
  int32_t* const starts = reinterpret_cast<int32_t*>(ring + 2 * kBandRing<real> * threads);
  return walk_band<real, topology, backward>(
      band, thread, BandExchange<real>(memory),
      ColumnReader<real, backward>(band, thread, ring + thread, starts + thread, threads));
}

}  // namespace cuda
}  // namespace pruned_rnnt
