// What the two warps of a stripe of the wave (lattice_wave.cuh) share: the lattice as they see it
// and the rings between them.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/topology.cuh"

namespace pruned_rnnt {
namespace cuda {

constexpr int kStripe = 32;  // columns of a walker
constexpr int kChunk = 8;    // steps of a period, and frames that a carrier handles in one
constexpr int kLag = kStripe / kChunk + 1;
// A frame's way through the ring: filled a period before its first lane's, 32 steps of the wave,
// stored a period after its last lane's, and before the slots are taken again in that period.
constexpr int kRingSteps = 80;
constexpr int kEdgeSteps = 32;

// Address of an element: base + t * frame_step + u * column_step.
template <typename pointer>
struct Plane {
  pointer base;
  int64_t frame_step, column_step;

  __device__ __forceinline__ pointer at(int32_t t, int32_t u) const {
    return base + t * frame_step + u * column_step;
  }
};

// One utterance as the walk sees it: from node (0,0) to node (frames, symbols).
template <typename real>
struct WaveLattice {
  Plane<const real*> px, py;
  Plane<real*> values;  // alpha or beta
  real* edge;           // room for frames + kStripe + kChunk numbers, if there are several passes
  int32_t frames;       // transitions by frame; 0 or less: there is no path
  int32_t symbols;
  int32_t emit_frames;   // frames below this have px (counted from the lattice's own beginning)
  int32_t value_frames;  // frames below this have a place in `values`
  real delay;            // delay * (middle - t) is added to px
  real middle;
};

template <typename real>
struct alignas(2 * sizeof(real)) ArcPair {
  real px, py;
};

// frames_run: whether neighbouring elements in memory are frames of one column (k2's layout)
// instead of columns of one frame (rows). The ring's rows are such that neither side meets a bank
// of shared memory twice.
template <bool frames_run>
constexpr int kRingRow = frames_run ? kStripe + 1 : kStripe;

// What the two warps of a stripe and the next walker share.
template <typename real, bool frames_run>
struct StripeMemory {
  ArcPair<real> ring[kRingSteps * kRingRow<frames_run>];  // px and py of a step; then the value
  Probability<real> edges[kEdgeSteps];                    // what the last lane sends, by step
};

// Where a stripe gets the values that cross its first edge from, and where it leaves its own: the
// stripe before in this pass, or global memory between two passes; all null at the lattice's ends.
template <typename real>
struct StripeEdges {
  const Probability<real>* before;
  const real* in;  // logarithms
  real* out;
};

}  // namespace cuda
}  // namespace pruned_rnnt
