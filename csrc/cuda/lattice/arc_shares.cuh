// How the two arcs of a node share the paths behind it, in one number a node.
//
// The shares of a node's arcs sum to 1, and the smaller one is kept, so that neither loses digits:
// s with a clear sign bit is the share of the emit, with a set one -s is that of the blank. The
// recursion that these numbers belong to is stated in pruned_rnnt/ops/lattice/lattice.py.
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace pruned_rnnt {
namespace cuda {

// `part` of the smaller of the two, of which the emit is one.
template <typename real>
__device__ __forceinline__ real share_of(bool emit_is_smaller, real part) {
  return emit_is_smaller ? part : -part;
}

// What the arcs of a node carry of its mass. Masses are double: the error of a step would reach all
// later ones.
struct Mass {
  double emit, blank;
};

template <typename real>
__device__ __forceinline__ Mass split_mass(double mass, real share) {
  const double smaller = mass * fabs(static_cast<double>(share));
  const double larger = mass - smaller;
  const bool blank_is_smaller = signbit(share);
  return {blank_is_smaller ? larger : smaller, blank_is_smaller ? smaller : larger};
}

}  // namespace cuda
}  // namespace pruned_rnnt
