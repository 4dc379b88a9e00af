// The recursion over any band, by a block that goes from one diagonal t + u to the next: what a
// node needs lies on the two diagonals before, whatever `start` does and however wide the band is.
// Values pass through global memory, so that this is for the bands that the other walks do not
// take.
//
// Axes: T frames, U symbols, S columns of the band.
#pragma once

#include "cuda/band.cuh"

namespace pruned_rnnt {
namespace cuda {

// The last symbol position that the band and the symbols have: a bound of the diagonals, however
// many symbols there are. Called by whole blocks, same answer for all threads.
template <typename real>
__device__ int32_t last_symbol_of(const BandLattice<real>& band) {
  __shared__ int32_t largest_start;
  if (threadIdx.x == 0) largest_start = -band.columns;
  __syncthreads();
  int32_t largest = -band.columns;
  for (int32_t t = threadIdx.x; t < band.frames; t += blockDim.x) {
    largest = max(largest, band.start[t]);
  }
  atomicMax(&largest_start, largest);
  __syncthreads();
  return max(0, min(band.symbols, largest_start + band.columns - 1));
}

template <typename real, Topology topology, bool backward>
class DiagonalWalk {
 public:
  __device__ explicit DiagonalWalk(const BandLattice<real>& band) : band_(band) {}

  // Writes alpha or beta of all nodes; called by all threads of the block, of which `threads` share
  // this walk. last_symbol: what last_symbol_of gave. Returns beta(0,0), or nothing of use.
  __device__ real run(int thread, int threads, int32_t last_symbol) const {
    const int32_t diagonals = band_.frames + last_symbol;
    for (int32_t i = 0; i < diagonals; ++i) {
      const int32_t k = backward ? diagonals - 1 - i : i;
      const int32_t last_frame = min(band_.frames - 1, k);
      for (int32_t t = max(0, k - last_symbol) + thread; t <= last_frame; t += threads) {
        const int64_t at = row(t, k - t);
        if (at >= 0) band_.values[at] = from_log_zero(backward ? beta(t, k - t) : alpha(t, k - t));
      }
      __syncthreads();
    }
    return value_at(0, 0);
  }

 private:
  // Row of node (t,u), or -1 outside the band.
  __device__ int64_t row(int32_t t, int32_t u) const {
    if (t < 0 || t >= band_.frames || u < 0 || u > band_.symbols) return -1;
    const int32_t column = u - band_.start[t];
    if (column < 0 || column >= band_.columns) return -1;
    return static_cast<int64_t>(t) * band_.columns + column;
  }
  __device__ real value_at(int32_t t, int32_t u) const {
    if (backward && t == band_.frames) return u == band_.symbols ? real(0) : kLogZero<real>;
    const int64_t at = row(t, u);
    return at >= 0 ? to_log_zero(band_.values[at]) : kLogZero<real>;
  }
  __device__ real py(int32_t t, int32_t u) const {
    const int64_t at = row(t, u);
    return at >= 0 ? to_log_zero(band_.py[at]) : kLogZero<real>;
  }
  // The emitting arc from (t,u).
  __device__ real px(int32_t t, int32_t u) const {
    const int64_t at = row(t, u);
    if (at < 0 || u >= band_.symbols) return kLogZero<real>;
    if (topology == Topology::kRna && t == band_.frames - 1) return kLogZero<real>;
    const real score = to_log_zero(band_.px[at] + band_.delay(t));
    return topology == Topology::kConstrained ? score + py(t, u + 1) : score;
  }
  __device__ real alpha(int32_t t, int32_t u) const {
    constexpr int32_t frames_back = topology == Topology::kRegular ? 0 : 1;
    const real begin = t == 0 && u == 0 ? real(0) : kLogZero<real>;
    const real stayed = value_at(t - 1, u) + py(t - 1, u);
    const real emitted = value_at(t - frames_back, u - 1) + px(t - frames_back, u - 1);
    return log_add(log_add(begin, stayed), emitted);
  }
  __device__ real beta(int32_t t, int32_t u) const {
    constexpr int32_t frames_on = topology == Topology::kRegular ? 0 : 1;
    return log_add(value_at(t + 1, u) + py(t, u), value_at(t + frames_on, u + 1) + px(t, u));
  }

  const BandLattice<real>& band_;
};

}  // namespace cuda
}  // namespace pruned_rnnt
