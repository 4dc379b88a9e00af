// The four transducer topologies (`rnnt_type` of the ops), as steps of the recursion stated in
// pruned_rnnt/ops/lattice/lattice.py: a column u of the lattice as a thread walks along its frames.
//
// A thread meets its column's frames in the order of the walk (halves.cuh), and for each gets what
// the neighbouring column (u+1 where the walk goes back, else u-1) `sends` from the same frame.
#pragma once

#include "cuda/lattice/halves.cuh"
#include "topology.h"

namespace pruned_rnnt {
namespace cuda {

// Two numbers of a node: logarithms px and py of its arcs, or the arcs' occupancies gx and gy. The
// first may also be the share that the second walk makes the latter from.
template <typename real>
struct alignas(2 * sizeof(real)) NodePair {
  real first, second;
};

// What a column is between two steps; sent() is for the neighbour's step at the frame of the last
// step.
template <typename real, Topology topology, Walk walk>
class Column;

// beta, from the logarithms of a node's arcs; the pair returned begins with the share.
template <typename real, Topology topology>
class Column<real, topology, Walk::kLateSums> {
 public:
  using Number = Probability<real>;

  // `begin`: 1 where the walk begins, at the node before its first step, else 0.
  __device__ __forceinline__ explicit Column(const Number& begin) : own_(begin) {}

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

  __device__ __forceinline__ const Number& sent() const { return sent_; }
  // The sum of the last node.
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

// alpha, likewise; the share is that of the emit among the arcs that lead to the node.
template <typename real, Topology topology>
class Column<real, topology, Walk::kEarlySums> {
 public:
  using Number = Probability<real>;

  __device__ __forceinline__ explicit Column(const Number& begin) : stayed_(begin) {}

  __device__ __forceinline__ NodePair<real> step(const NodePair<real>& arcs,
                                                 const Number& neighbour) {
    const Number px = Number::exp(arcs.first), py = Number::exp(arcs.second);
    Number emitted = topology == Topology::kRegular ? neighbour : neighbour_before_;
    if (topology == Topology::kConstrained) emitted = emitted * py_before_;
    neighbour_before_ = neighbour;
    py_before_ = py;
    NodePair<real> result{};
    own_ = Number::add_shared(emitted, stayed_, result.first);
    stayed_ = own_ * py;
    sent_ = own_ * px;
    return result;
  }

  __device__ __forceinline__ const Number& sent() const { return sent_; }
  __device__ __forceinline__ const Number& own() const { return own_; }
  __device__ __forceinline__ void normalise() {
    own_.normalise();
    stayed_.normalise();
    neighbour_before_.normalise();
    sent_.normalise();
  }

 private:
  Number stayed_;
  Number own_ = Number::zero();
  Number neighbour_before_ = Number::zero();
  Number sent_ = Number::zero();
  Number py_before_ = Number::one();
};

// Occupancies of a node's arcs, from its share and the mass that arrives.
template <typename real, Topology topology>
class Column<real, topology, Walk::kLateMasses> {
 public:
  using Number = Occupancy;

  // `begin`: the mass of this column's node at the cut.
  __device__ __forceinline__ explicit Column(const Number& begin) : blank_(begin) {}

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

// Occupancies of a node's arcs are what their targets hand back; the node hands their sum back in
// turn, by its share.
template <typename real, Topology topology>
class Column<real, topology, Walk::kEarlyMasses> {
 public:
  using Number = Occupancy;

  __device__ __forceinline__ explicit Column(const Number& begin) : blank_(begin) {}

  __device__ __forceinline__ NodePair<real> step(const NodePair<real>& share,
                                                 const Number& neighbour) {
    const double emit = (topology == Topology::kRegular ? neighbour : neighbour_before_).value;
    neighbour_before_ = neighbour;
    // The blank is also part of the emit that leads to this column's next frame.
    const double used = topology == Topology::kConstrained ? sent_.value : 0;
    const double blank = blank_.value;
    const Mass mass = split_mass(emit + blank, share.first);
    sent_.value = mass.emit;
    blank_.value = mass.blank;
    return {static_cast<real>(emit), static_cast<real>(blank + used)};
  }

  __device__ __forceinline__ const Number& sent() const { return sent_; }
  __device__ __forceinline__ const Number& own() const { return blank_; }
  __device__ __forceinline__ void normalise() {}

 private:
  Number blank_;
  Number neighbour_before_ = Number::zero();
  Number sent_ = Number::zero();
};

}  // namespace cuda
}  // namespace pruned_rnnt
