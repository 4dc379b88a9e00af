// The four transducer topologies (`rnnt_type` of the ops), as steps of the recursion stated in
// pruned_rnnt/ops/lattice.py: a column u of the lattice as a thread walks along its frames.
//
// A thread meets its column's frames in order, and for each gets what the neighbouring column
// (u+1 on the way back, u-1 on the way forward) `sends` from the same frame.
#pragma once

#include "cuda/probability.cuh"
#include "topology.h"

namespace pruned_rnnt {
namespace cuda {

// Two numbers of a node: logarithms px and py of its arcs, or the arcs' occupancies gx and gy. The
// first may also be the share that the second walk makes the latter from.
template <typename real>
struct alignas(2 * sizeof(real)) NodePair {
  real first, second;
};

template <typename real, Topology topology>
class BackwardColumn {
 public:
  using Number = Probability<real>;

  // `first`: whether the walk begins in this column, at the node before its first step.
  __device__ __forceinline__ explicit BackwardColumn(bool first)
      : own_(first ? Number::one() : Number::zero()) {}

  // beta of the next node, from the logarithms of its arcs; the pair returned begins with the
  // share.
  __device__ __forceinline__ NodePair<real> step(const NodePair<real>& arcs,
                                                 const Number& neighbour) {
    // Only `regular` emits inside a frame, and the emit of `constrained` has a blank of the same
    // frame in it; otherwise what comes from the neighbour is a frame old.
    constexpr bool same_frame =
        topology == Topology::kRegular || topology == Topology::kConstrained;
    const Number px = Number::exp(arcs.first), py = Number::exp(arcs.second);
    const Number arriving = same_frame ? neighbour : neighbour_before_;
    neighbour_before_ = neighbour;
    const Number stayed = own_ * py;
    NodePair<real> result{};
    own_ = Number::add_shared(arriving * px, stayed, result.first);
    sent_ = topology == Topology::kConstrained ? stayed : own_;
    return result;
  }

  // For the neighbour's step at the frame of the last step.
  __device__ __forceinline__ const Number& sent() const { return sent_; }
  // beta of the last node.
  __device__ __forceinline__ const Number& own() const { return own_; }

  // To be called every few steps.
  __device__ __forceinline__ void normalise() {
    own_.normalise();
    neighbour_before_.normalise();
    sent_.normalise();
  }

 private:
  Number own_;
  Number neighbour_before_ = Number::zero();
  Number sent_ = Number::zero();
};

template <typename real, Topology topology>
class ForwardColumn {
 public:
  using Number = Occupancy;

  __device__ __forceinline__ explicit ForwardColumn(bool first)
      : blank_(first ? Number::one() : Number::zero()) {}

  // Occupancies of the arcs of the next node, from their share.
  __device__ __forceinline__ NodePair<real> step(const NodePair<real>& share,
                                                 const Number& neighbour) {
    const Number arriving = topology == Topology::kRegular ? neighbour : neighbour_before_;
    neighbour_before_ = neighbour;
    const Mass mass = split_mass((blank_ + arriving).value, share.first);
    sent_.value = mass.emit;
    blank_.value = mass.blank;
    // The blank is also part of the emit that comes from the neighbour in the same frame.
    const double used = topology == Topology::kConstrained ? neighbour.value : 0;
    return {static_cast<real>(mass.emit), static_cast<real>(mass.blank + used)};
  }

  __device__ __forceinline__ const Number& sent() const { return sent_; }
  __device__ __forceinline__ const Number& own() const { return blank_; }
  __device__ __forceinline__ void normalise() {}

 private:
  Number blank_;
  Number neighbour_before_ = Number::zero();
  Number sent_ = Number::zero();
};

template <typename real, Topology topology, bool backward>
using Column =
    std::conditional_t<backward, BackwardColumn<real, topology>, ForwardColumn<real, topology>>;

}  // namespace cuda
}  // namespace pruned_rnnt
