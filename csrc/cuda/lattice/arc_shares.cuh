// The shares of a node's two arcs in one number, stored as in cpu/lattice/arc_shares.h.
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace pruned_rnnt::cuda {

// Stores `part`, the share of the smaller arc.
template <typename real>
RNNT_DEVICE real share_of(bool emit_is_smaller, real part) {
  return emit_is_smaller ? part : -part;
}

// Masses of a node's arcs, in double: the error of a step reaches all later ones.
struct Mass {
  double emit, blank;
};

template <typename real>
RNNT_DEVICE Mass split_mass(double mass, real share) {
  const double smaller = mass * fabs(static_cast<double>(share));
  const double larger = mass - smaller;
  const bool blank_is_smaller = signbit(share);
  return {blank_is_smaller ? larger : smaller, blank_is_smaller ? smaller : larger};
}

}  // namespace pruned_rnnt::cuda
