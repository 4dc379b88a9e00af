// Shared by the warps of a stripe of the wave (lattice_wave.cuh): their view of the lattice, and
// the rings between them.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/lattice/topology.cuh"

namespace pruned_rnnt::cuda {

constexpr int kStripe = 32;  // columns of a walker
constexpr int kChunk = 8;    // steps of a period, and frames that a carrier handles in one
constexpr int kLag = kStripe / kChunk + 1;
// A frame is filled one period before its first lane's step, takes 32 steps of the wave, and is
// stored one period after its last lane's step, before its slots are used again.
constexpr int kRingSteps = 80;
constexpr int kEdgeSteps = 32;

// How the nodes lie in memory. Neighbouring elements are
//   kFrames   frames of one column (k2's layout)
//   kRows     columns of one frame
//   kBand     columns of one frame, of which only start(t) .. start(t) + width - 1 are stored
enum class Layout { kFrames, kRows, kBand };

// Address of an element: base + t * frame_step + u * column_step. In a band a column u of frame t
// is start(t) elements before that.
template <typename pointer>
struct Plane {
  pointer base;
  int64_t frame_step, column_step;

  RNNT_DEVICE pointer at(int32_t t, int32_t u) const {
    return base + t * frame_step + u * column_step;
  }
};

// One utterance, or a half of it, from node (0,0) to node (frames, symbols).
template <typename real>
struct WaveLattice {
  Plane<const real*> px, py;
  Plane<real*> gx, gy;  // between the two walks, one of them holds shares
  int32_t frames;       // transitions by frame; 0 or less: there is no path
  int32_t symbols;
  int32_t emit_frames;  // frames below this have an arc that emits
  int32_t gx_frames;    // frames below this are in gx
  real delay;           // delay * (middle - t) is added to px
  real middle;
  const int32_t* start = nullptr;  // of a band: its first column in every frame, and its columns
  int32_t width = 0;

  RNNT_DEVICE WaveLattice half(bool early) const {
    WaveLattice result = *this;
    const int32_t cut = cut_of(frames);
    if (early) {
      result.frames = result.emit_frames = result.gx_frames = cut;
      return result;
    }
    result.px.base = px.at(cut, 0);
    result.py.base = py.at(cut, 0);
    result.gx.base = gx.at(cut, 0);
    result.gy.base = gy.at(cut, 0);
    if (start != nullptr) result.start += cut;
    result.frames -= cut;
    result.emit_frames -= cut;
    result.gx_frames -= cut;
    result.middle -= static_cast<real>(cut);
    return result;
  }

  // Where CutMemory keeps symbol u of a half: at u, or at its column of the band; -1: not kept.
  RNNT_DEVICE int32_t place_at_cut(bool early, int32_t u) const {
    if (start == nullptr) return u;
    const int32_t column = u - start[early ? frames : 0];
    return column < width ? max(column, -1) : -1;
  }
};

// The length of the ring's rows avoids bank conflicts on both sides.
template <Layout layout>
constexpr int kRingRow = layout == Layout::kFrames ? kStripe + 1 : kStripe;

// A value that the last lane of a stripe sends: a Probability or an Occupancy.
struct alignas(8) EdgeSlot {
  unsigned char bytes[8];
};

template <typename real, Layout layout>
struct StripeMemory {
  // A node's inputs, then its results.
  NodePair<real> ring[kRingSteps * kRingRow<layout>];
  EdgeSlot edges[kEdgeSteps];  // by step

  template <typename Number>
  RNNT_DEVICE Number* edges_of() {
    static_assert(sizeof(Number) == sizeof(EdgeSlot));
    return reinterpret_cast<Number*>(edges);
  }
};

}  // namespace pruned_rnnt::cuda
