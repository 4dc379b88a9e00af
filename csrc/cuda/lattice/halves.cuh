// The recursion over an utterance in two halves of its frames, which two blocks walk at the same
// time, in two launches (formulas: pruned_rnnt/ops/lattice/lattice.py):
//
//   beta(t,u)  = emit(t,u) beta(target of the emit) + blank(t,u) beta(t+1,u)     late sums
//   alpha(t,u) = the same over the arcs that lead to (t,u)                       early sums
//   mass(t,u)  = sum over the arcs to (t,u) of mass(source) * share of the arc   late masses
//
//   frames    0 .......... M-1 | M .......... T-1
//   sums      alpha - early -->|<-- late - beta       a(u), b(u) of the nodes (M,u)
//   masses    <----- early --- | --- late ------>     m(u) = a(u) b(u) / P, P = sum of a(u) b(u)
//
// The early shares are those of the arcs that lead to a node, and early masses go back along them.
// An utterance takes as many dependent steps as if alpha and beta were walked at the same time, and
// loses no digits to their product.
//
// An arc belongs to the frame of its source: with `regular`, a(u) counts only blanks into frame M,
// and the emits inside frame M are part of b.
#pragma once

#include "cuda/lattice/probability.cuh"
#include "workspaces.h"

namespace pruned_rnnt::cuda {

template <typename real>
struct LatticeArrays {
  const real *px, *py;
  real *total, *gx, *gy, *work;
};

enum class Walk { kEarlySums, kLateSums, kEarlyMasses, kLateMasses };

constexpr bool is_early(Walk walk) {
  return walk == Walk::kEarlySums || walk == Walk::kEarlyMasses;
}
constexpr bool makes_sums(Walk walk) { return walk == Walk::kEarlySums || walk == Walk::kLateSums; }
// Whether the walk goes from the last frame and symbol to the first.
constexpr bool goes_back(Walk walk) {
  return walk == Walk::kLateSums || walk == Walk::kEarlyMasses;
}

// M, the number of frames of the early half. The late half has at least one frame.
__host__ __device__ inline int32_t cut_of(int32_t frames) { return frames / 2; }

// Where `work` keeps the edges of an utterance: behind those of so many frames of the utterances
// before, with room for so many frames of its own.
struct EdgePlace {
  int64_t frames_before, frames;
};

// Results that the walks of an utterance exchange in global memory (an op's `work`), for up to
// `columns` nodes of a frame:
//
//   a (2,columns) | b (2,columns) | share of the nodes at the cut (columns)     of each utterance
//   edges (2, 2 (T+2))                                                          of each utterance
//
// a and b as Probability::save writes them. Edges: values that go from one pass over the columns of
// a wide lattice to the next, for the early and the late half.
template <typename real>
class CutMemory {
 public:
  RNNT_DEVICE CutMemory(real* work, int64_t utterances, int64_t columns, int64_t n, EdgePlace place)
      : base_(work + n * 5 * columns),
        edges_(work + utterances * 5 * columns + 4 * (place.frames_before + 2 * n)),
        columns_(columns),
        frames_(place.frames) {}

  RNNT_DEVICE void save(bool early, int32_t column, const Probability<real>& sum) const {
    real* const first = base_ + (early ? 0 : 2) * columns_ + column;
    sum.save(first, first + columns_);
  }
  RNNT_DEVICE real* share() const { return base_ + 4 * columns_; }
  RNNT_DEVICE real* edges(bool early) const { return edges_ + (early ? 0 : 2 * (frames_ + 2)); }
  // log(a b) of a node at the cut.
  RNNT_DEVICE double log_both(int32_t column) const {
    return sum_of(0, column).exact_log() + sum_of(2, column).exact_log();
  }

 private:
  RNNT_DEVICE Probability<real> sum_of(int place, int32_t column) const {
    const real* const first = base_ + place * columns_ + column;
    return Probability<real>::load(first, first + columns_);
  }

  real *base_, *edges_;
  int64_t columns_, frames_;
};

// log P from the nodes 0 .. count-1 at the cut, -inf if no path crosses it. All threads of the
// block call this and get the result.
template <typename real>
__device__ double log_total(const CutMemory<real>& cut, int32_t count) {
  __shared__ double of_warps[32];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  const auto over_block = [&](double own, auto combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      own = combine(own, __shfl_xor_sync(kAllLanes, own, distance));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[warp] = own;
    __syncthreads();
    double all = of_warps[0];
    for (int i = 1; i < warps; ++i) all = combine(all, of_warps[i]);
    return all;
  };
  double own = minus_infinity<double>();
  for (int32_t u = threadIdx.x; u < count; u += blockDim.x) own = fmax(own, cut.log_both(u));
  double largest = over_block(own, [](double x, double y) { return fmax(x, y); });
  // Not fmax alone: NaN must reach the sum.
  if (largest == minus_infinity<double>()) largest = 0;
  own = 0;
  for (int32_t u = threadIdx.x; u < count; u += blockDim.x) own += exp(cut.log_both(u) - largest);
  return largest + log(over_block(own, [](double x, double y) { return x + y; }));
}

// m(u), if log P is not -inf.
template <typename real>
RNNT_DEVICE Occupancy cut_mass(const CutMemory<real>& cut, int32_t column, double log_p) {
  return {exp(cut.log_both(column) - log_p)};
}

}  // namespace pruned_rnnt::cuda
