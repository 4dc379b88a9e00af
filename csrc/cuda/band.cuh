// One utterance's band of lattice nodes, and the recursion over it by a single thread, which takes
// any band. The kernels for bands that never move back are in band_wave.cuh and band_walk.cuh.
//
// Axes: T frames, S columns of the band: column j of frame t is symbol u = start(t) + j.
#pragma once

#include "cuda/row_cursor.cuh"
#include "cuda/topology.cuh"

namespace pruned_rnnt {
namespace cuda {

template <typename real>
struct BandLattice {
  const real *px, *py;   // rows of S
  const int32_t* start;  // of every frame
  real* values;          // alpha or beta
  int32_t frames, symbols, columns;
  real delay_penalty;

  // Added to px at frame t.
  __device__ __forceinline__ real delay(int32_t t) const {
    const real middle = static_cast<real>(frames - 1) / 2;
    return delay_penalty == 0 ? real(0) : delay_penalty * (middle - static_cast<real>(t));
  }
};

// Whether start goes back somewhere; called by whole blocks, same answer for all threads.
__device__ inline bool start_decreases(const int32_t* start, int32_t frames) {
  int found = 0;
  for (int32_t t = threadIdx.x + 1; t < frames; t += blockDim.x) found |= start[t] < start[t - 1];
  return __syncthreads_or(found) != 0;
}

// Writes alpha or beta of all nodes, whatever `start` does. Returns beta(0,0), or nothing of use.
template <typename real, Topology topology, bool backward>
class LoneBandWalk {
 public:
  __device__ explicit LoneBandWalk(const BandLattice<real>& band) : band_(band) {}

  __device__ real run() const {
    const int32_t S = band_.columns;
    for (int32_t f = 0; f < band_.frames; ++f) {
      const int32_t t = backward ? band_.frames - 1 - f : f;
      for (int32_t i = 0; i < S; ++i) {
        const int32_t j = backward ? S - 1 - i : i, u = band_.start[t] + j;
        const bool valid = u >= 0 && u <= band_.symbols;
        const real value = valid ? (backward ? beta(t, u) : alpha(t, u)) : kLogZero<real>;
        band_.values[static_cast<int64_t>(t) * S + j] = from_log_zero(value);
      }
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
