// The recursion over any band, diagonal by diagonal, for the bands that the other walks
// do not take:
//
//   beta(t,u) = emit(t,u) beta(t+e,u+1) + blank(t,u) beta(t+1,u)     e = 0 if regular, else 1
//   mass(t,u) = emit occupancy(t-e,u-1) + blank occupancy(t-1,u)
//
//   u  2  . \ .        A diagonal k = t + u depends only on diagonals k + 1 and k + 2 (backward) or
//      1  .  . \       k - 1 and k - 2 (forward), whatever `start` is and however wide the band is.
//      0  .  .  .      The threads of a block take the nodes of a diagonal.
//         0  1  2  t
//
// Values pass through global memory, which is slower. gx and gy hold beta between the two walks, as
// Probability::save writes it.
//
// Axes: T frames, U symbols, S columns of the band.
#pragma once

#include "cuda/lattice/band.cuh"

namespace pruned_rnnt::cuda {

// The last symbol position inside the band, which bounds the diagonals. All threads of the block
// call this and get the result.
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

template <typename real, Topology topology>
class DiagonalWalk {
  using Number = Probability<real>;
  // Frames that an emit takes.
  static constexpr int32_t kEmitFrames = topology == Topology::kRegular ? 0 : 1;

 public:
  __device__ explicit DiagonalWalk(const BandLattice<real>& band)
      : band_(band), last_symbol_(last_symbol_of(band)) {}

  // Both walks, by all threads of the block. Returns log P; if it is -inf, gx and gy are undefined.
  __device__ real run() const {
    const int32_t diagonals = band_.frames + last_symbol_;
    for (int32_t k = diagonals - 1; k >= 0; --k) {
      for_nodes_on(k, [&](int32_t t, int32_t u, int64_t at) {
        real share;
        Number beta = either(t, u, share);
        beta.normalise();
        beta.save(band_.gx + at, band_.gy + at);
      });
    }
    const int64_t corner = row(0, 0);
    const real total = corner >= 0 ? from_log_zero(beta_at(0, 0).log()) : minus_infinity<real>();
    // The forward walk overwrites gx and gy.
    __syncthreads();
    if (total == minus_infinity<real>()) return total;
    for (int32_t k = 0; k < diagonals; ++k) {
      for_nodes_on(k, [&](int32_t t, int32_t u, int64_t at) {
        real share;
        either(t, u, share);
        const int64_t stayed = row(t - 1, u), emitted = row(t - kEmitFrames, u - 1);
        double mass = t == 0 && u == 0 ? 1.0 : 0.0;
        if (stayed >= 0) mass += band_.gy[stayed];
        if (emitted >= 0) mass += band_.gx[emitted];
        const Mass of_arcs = split_mass(mass, share);
        band_.gx[at] = static_cast<real>(of_arcs.emit);
        band_.gy[at] = static_cast<real>(of_arcs.blank);
      });
    }
    clear_invalid();
    return total;
  }

 private:
  // Calls work(t, u, row) for the nodes with t + u = k, and waits for all threads.
  template <typename Work>
  __device__ void for_nodes_on(int32_t k, Work&& work) const {
    const int32_t last_frame = min(band_.frames - 1, k);
    for (int32_t t = max(0, k - last_symbol_) + threadIdx.x; t <= last_frame; t += blockDim.x) {
      const int64_t at = row(t, k - t);
      if (at >= 0) work(t, k - t, at);
    }
    __syncthreads();
  }

  // Row of node (t,u), or -1 outside the band.
  __device__ int64_t row(int32_t t, int32_t u) const {
    if (t < 0 || t >= band_.frames || u < 0 || u > band_.symbols) return -1;
    const int32_t column = u - band_.start[t];
    if (column < 0 || column >= band_.columns) return -1;
    return int64_t(t) * band_.columns + column;
  }
  __device__ Number beta_at(int32_t t, int32_t u) const {
    if (t == band_.frames) return u == band_.symbols ? Number::one() : Number::zero();
    const int64_t at = row(t, u);
    return at >= 0 ? Number::load(band_.gx + at, band_.gy + at) : Number::zero();
  }
  __device__ NodePair<real> arcs(int32_t t, int32_t u) const {
    const int64_t at = row(t, u);
    if (at < 0) return {kLogZero<real>, kLogZero<real>};
    return band_.template arcs<topology>(t, u, band_.px[at], band_.py[at]);
  }

  // beta of a node of the band from the targets of its arcs, and the arc share.
  __device__ Number either(int32_t t, int32_t u, real& share) const {
    const NodePair<real> own = arcs(t, u);
    Number emitted = beta_at(t + kEmitFrames, u + 1) * Number::exp(own.first);
    if (topology == Topology::kConstrained) {
      emitted = emitted * Number::exp(arcs(t, u + 1).second);
    }
    return Number::add_shared(emitted, beta_at(t + 1, u) * Number::exp(own.second), share);
  }

  // Clears rows without a node, and adds the blanks that are part of an emit of `constrained`.
  __device__ void clear_invalid() const {
    const int64_t rows = int64_t(band_.frames) * band_.columns;
    for (int64_t i = threadIdx.x; i < rows; i += blockDim.x) {
      const int32_t t = int32_t(i / band_.columns);
      const int32_t column = int32_t(i - int64_t(t) * band_.columns);
      const int32_t u = band_.start[t] + column;
      if (u < 0 || u > band_.symbols) {
        band_.gx[i] = band_.gy[i] = 0;
      } else if (topology == Topology::kConstrained && column > 0 && u > 0) {
        band_.gy[i] += band_.gx[i - 1];
      }
    }
  }

  const BandLattice<real>& band_;
  const int32_t last_symbol_;
};

}  // namespace pruned_rnnt::cuda
