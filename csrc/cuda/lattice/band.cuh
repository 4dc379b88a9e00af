// One utterance's band of lattice nodes, as band_segments.cuh walks over it.
//
// Axes: T frames, S columns of the band: column j of frame t is symbol u = start(t) + j.
#pragma once

#include "cuda/common/row_cursor.cuh"
#include "cuda/lattice/topology.cuh"

namespace pruned_rnnt::cuda {

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

}  // namespace pruned_rnnt::cuda
