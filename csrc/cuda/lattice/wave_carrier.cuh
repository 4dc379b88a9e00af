// The warps that load the inputs of a stripe of the wave (lattice_wave.cuh) and store its results.
// Sums: px, py to shares. Masses: shares to gx, gy. Late halves store the shares in gx, early ones
// in gy, which has an element for every column and frame below the cut.
//
// Axes: t frames, u columns; both count from the corner where the walk begins.
#pragma once

#include "cuda/lattice/wave_stripe.cuh"

namespace pruned_rnnt::cuda {

// The i-th nodes of the 32 lanes, of a chunk of frames and a stripe's columns, are contiguous in
// memory.
template <typename real, Layout layout, Walk walk>
class Carrier {
  static constexpr bool frames_run = layout == Layout::kFrames;
  static constexpr bool kEarly = is_early(walk), kSums = makes_sums(walk);
  static constexpr bool kBack = goes_back(walk);

 public:
  // Chunks fetched in advance: about a microsecond.
  static constexpr int ahead = 2;

  // cut_share: of the nodes at the end of an early half.
  RNNT_DEVICE Carrier(const WaveLattice<real>& lattice, const real* cut_share, int32_t first_column,
                      StripeMemory<real, layout>& memory)
      : lattice_(lattice),
        cut_share_(cut_share),
        memory_(memory),
        lane_frame_(frames_run ? threadIdx.x % kChunk : 0),
        lane_column_(threadIdx.x % 32 / (frames_run ? kChunk : 1)),
        first_column_(first_column),
        nodes_(lattice.frames + 1) {
    for (int i = 0; i < kChunk; ++i) {
      const int32_t s = symbol(first_column + column(i));
      if (s >= 0 && s <= lattice.symbols) inside_ |= 1u << i;
      if (s >= 0 && s < lattice.symbols) emits_ |= 1u << i;
    }
  }

  // Loads for the period in which the walker does `chunk`. `turn` is the period modulo `ahead`:
  // fetched nodes stay in its registers until that turn comes again.
  template <int turn>
  RNNT_DEVICE void load(int32_t chunk) {
    fill((chunk + 1) * kChunk, fetched_[turn]);
    fetch((chunk + 1 + ahead) * kChunk, fetched_[turn]);
  }
  // No slot of the ring is both filled and stored in one period: of a step, the first lanes are
  // stored while the last ones are filled.
  RNNT_DEVICE void store(int32_t chunk) const {
    const int32_t begin = (chunk - kLag) * kChunk;
    if (ordinary(begin)) {
      store_chunk<false>(begin);
    } else if (begin >= 0 && begin < nodes_) {
      store_chunk<true>(begin);
    }
  }

 private:
  // The walk's (t,u) is (frame(t), symbol(u)) in memory.
  RNNT_DEVICE int32_t frame(int32_t t) const { return kBack ? lattice_.frames - t : t; }
  RNNT_DEVICE int32_t symbol(int32_t u) const { return kBack ? lattice_.symbols - u : u; }
  // Frame (from the chunk's first on) and column (of the stripe) of this lane's i-th node.
  RNNT_DEVICE int frame_in_chunk(int i) const { return frames_run ? lane_frame_ : i; }
  RNNT_DEVICE int column(int i) const {
    return frames_run ? lane_column_ + kStripe / kChunk * i : lane_column_;
  }
  RNNT_DEVICE bool inside(int i) const { return inside_ >> i & 1; }
  RNNT_DEVICE bool emits(int i) const { return emits_ >> i & 1; }
  // k2's gx has no column for the last symbol; rows have one, with 0.
  RNNT_DEVICE bool has_gx(int i) const { return frames_run ? emits(i) : inside(i); }
  RNNT_DEVICE bool has_share(int i) const { return kEarly ? inside(i) : emits(i); }
  RNNT_DEVICE const Plane<real*>& shares() const { return kEarly ? lattice_.gy : lattice_.gx; }
  RNNT_DEVICE int32_t share_frames() const { return kEarly ? lattice_.frames : lattice_.gx_frames; }

  static constexpr int32_t kNotStored = std::numeric_limits<int32_t>::min();
  // Elements by which a band displaces this lane's column in frame `at` of memory, or kNotStored.
  RNNT_DEVICE int32_t displacement(int32_t at) const {
    if constexpr (layout != Layout::kBand) return 0;
    if (at < 0 || at >= lattice_.frames) return kNotStored;
    const int32_t start = lattice_.start[at], own = symbol(first_column_ + lane_column_) - start;
    return own >= 0 && own < lattice_.width ? -start : kNotStored;
  }

  // Whether all frames of a chunk have all arcs, as most do: then no frame needs a check.
  RNNT_DEVICE bool ordinary(int32_t begin) const {
    const int32_t first = kBack ? frame(begin + kChunk - 1) : begin;
    return first >= 0 && first + kChunk < lattice_.frames;
  }

  // Address of this lane's first node of a chunk, and the distance to its next.
  template <typename pointer>
  RNNT_DEVICE pointer first_of(const Plane<pointer>& plane, int32_t begin) const {
    return plane.at(frame(begin + lane_frame_), symbol(first_column_ + lane_column_));
  }
  template <typename pointer>
  RNNT_DEVICE int64_t step_of(const Plane<pointer>& plane) const {
    const int64_t step = frames_run ? kStripe / kChunk * plane.column_step : plane.frame_step;
    return kBack ? -step : step;
  }

  RNNT_DEVICE void fetch(int32_t begin, NodePair<real> (&nodes)[kChunk]) const {
    if (ordinary(begin)) {
      fetch_chunk<false>(begin, nodes);
    } else if (begin + kChunk > 0 && begin < nodes_) {
      fetch_chunk<true>(begin, nodes);
    }
  }
  template <bool checked>
  RNNT_DEVICE void fetch_chunk(int32_t begin, NodePair<real> (&nodes)[kChunk]) const {
    if constexpr (kSums) {
      const real* px = first_of(lattice_.px, begin);
      const real* py = first_of(lattice_.py, begin);
      const int64_t px_step = step_of(lattice_.px), py_step = step_of(lattice_.py);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int32_t at = frame(begin + frame_in_chunk(i));
        const bool emit_exists = !checked || (at >= 0 && at < lattice_.emit_frames);
        const int32_t shift = displacement(at);
        if (shift == kNotStored) {
          nodes[i] = {minus_infinity<real>(), minus_infinity<real>()};
        } else {
          if (emits(i) && emit_exists) nodes[i].first = px[shift];
          if (inside(i) && (!checked || (at >= 0 && at < lattice_.frames))) {
            nodes[i].second = py[shift];
          }
        }
        px += px_step;
        py += py_step;
      }
    } else {
      const real* share = first_of(shares(), begin);
      const int64_t share_step = step_of(shares());
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int32_t at = frame(begin + frame_in_chunk(i));
        const int32_t shift = displacement(at);
        if (has_share(i)) {
          if (shift == kNotStored) nodes[i].first = 0;
          if (checked && kEarly && at == lattice_.frames) {
            const int32_t place = lattice_.place_at_cut(true, symbol(first_column_ + column(i)));
            if (place >= 0) nodes[i].first = cut_share_[place];
          } else if (shift != kNotStored && (!checked || (at >= 0 && at < share_frames()))) {
            nodes[i].first = share[shift];
          }
        }
        share += share_step;
      }
    }
  }

  // This lane's i-th slot of a chunk whose first frame begins at step `begin_slot` of the ring.
  RNNT_DEVICE NodePair<real>& slot(int32_t begin_slot, int i) const {
    int step = begin_slot + frame_in_chunk(i) + column(i);
    if (step >= kRingSteps) step -= kRingSteps;
    return memory_.ring[step * kRingRow<layout> + column(i)];
  }
  RNNT_DEVICE static int32_t slot_of(int32_t t) { return (t + kRingSteps) % kRingSteps; }

  // Frames before the first are filled with zeros, for the lanes that the wave has not reached.
  RNNT_DEVICE void fill(int32_t begin, const NodePair<real> (&nodes)[kChunk]) const {
    if (ordinary(begin)) {
      fill_chunk<false>(begin, nodes);
    } else if (begin < nodes_) {
      fill_chunk<true>(begin, nodes);
    }
  }
  template <bool checked>
  RNNT_DEVICE void fill_chunk(int32_t begin, const NodePair<real> (&nodes)[kChunk]) const {
    const int32_t begin_slot = slot_of(begin);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int32_t t = begin + frame_in_chunk(i), at = frame(t);
      // Before the first step there are no slots.
      if (checked && t + column(i) < 0) continue;
      const bool outside = checked && (t < 0 || t >= nodes_);
      NodePair<real> clean;
      if constexpr (kSums) {
        const real delay = lattice_.delay * (lattice_.middle - static_cast<real>(at));
        clean.first = emits(i) ? to_log_zero(nodes[i].first + delay) : kLogZero<real>;
        clean.second = inside(i) ? to_log_zero(nodes[i].second) : kLogZero<real>;
        if (outside || (checked && at >= lattice_.emit_frames)) clean.first = kLogZero<real>;
        if (outside) clean.second = kLogZero<real>;
        // The step from the last node has probability 1; no arc of an early half leaves the cut.
        if (checked && at == lattice_.frames) {
          clean.second = !kEarly && inside(i) ? real(0) : kLogZero<real>;
        }
      } else {
        // A share of 0: all by the blank.
        clean = {has_share(i) ? nodes[i].first : real(0), real(0)};
        if (outside || (checked && !kEarly && at >= lattice_.gx_frames)) clean.first = 0;
      }
      slot(begin_slot, i) = clean;
    }
  }

  template <bool checked>
  RNNT_DEVICE void store_chunk(int32_t begin) const {
    const int32_t begin_slot = slot_of(begin);
    if constexpr (kSums) {
      real* share = first_of(shares(), begin);
      const int64_t share_step = step_of(shares());
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int32_t at = frame(begin + frame_in_chunk(i));
        const bool exists = !checked || (at >= 0 && at < share_frames());
        const int32_t shift = displacement(at);
        if (has_share(i) && exists && shift != kNotStored) {
          share[shift] = slot(begin_slot, i).first;
        }
        share += share_step;
      }
    } else {
      real* gx = first_of(lattice_.gx, begin);
      real* gy = first_of(lattice_.gy, begin);
      const int64_t gx_step = step_of(lattice_.gx), gy_step = step_of(lattice_.gy);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int32_t at = frame(begin + frame_in_chunk(i));
        const NodePair<real> node = slot(begin_slot, i);
        const int32_t shift = displacement(at);
        if (shift != kNotStored) {
          if (has_gx(i) && (!checked || (at >= 0 && at < lattice_.gx_frames)))
            gx[shift] = node.first;
          if (inside(i) && (!checked || (at >= 0 && at < lattice_.frames))) gy[shift] = node.second;
        }
        gx += gx_step;
        gy += gy_step;
      }
    }
  }

  const WaveLattice<real>& lattice_;
  const real* const cut_share_;
  StripeMemory<real, layout>& memory_;
  const int lane_frame_, lane_column_;
  const int32_t first_column_, nodes_;
  // Bit i: whether this lane's i-th column is one of the lattice's, and whether it has a symbol.
  unsigned inside_ = 0, emits_ = 0;
  NodePair<real> fetched_[ahead][kChunk];
};

}  // namespace pruned_rnnt::cuda
