// One step of the recursion of pruned_rnnt/ops/lattice/lattice.py: a column u of the lattice, as a
// thread walks along its frames in the order of the walk (halves.cuh). Each step gets the value
// that the neighbouring column (u+1 if the walk goes back, else u-1) sent at the same frame:
//
//   frame        t-1      t
//   neighbour     .  ---> o        `regular` uses it at once (emits stay in a frame), the other
//   this column   o  ---> o        topologies one step later (emits take a frame)
#pragma once

#include "cuda/lattice/halves.cuh"
#include "topology.h"

namespace pruned_rnnt::cuda {

// Two numbers of a node: px and py, or the occupancies of its arcs. Between the two walks the first
// is the arc share.
template <typename real>
struct alignas(2 * sizeof(real)) NodePair {
  real first, second;
};

// State of a column between two steps. `begin` is its value before the first step: for sums 1 at
// the corner where the walk begins and else 0, for masses that of the node at the cut.
template <typename Number_>
class ColumnState {
 public:
  using Number = Number_;

  // Value for the neighbour's step at the same frame.
  RNNT_DEVICE const Number& sent() const { return sent_; }
  // Sum of the last node.
  RNNT_DEVICE const Number& own() const { return own_; }
  // To be called every few steps.
  RNNT_DEVICE void normalise() {
    own_.normalise();
    neighbour_before_.normalise();
    sent_.normalise();
  }

 protected:
  RNNT_DEVICE explicit ColumnState(const Number& own) : own_(own) {}

  Number own_;
  Number neighbour_before_ = Number::zero();
  Number sent_ = Number::zero();
};

// Masses: occupancies of a node's arcs, from its share. Late walks split the mass that arrives
// along the node's arcs; early walks get the occupancies from the arcs' targets and pass on their
// sum.
template <typename real, Topology topology, Walk walk>
class Column : public ColumnState<Occupancy> {
 public:
  RNNT_DEVICE explicit Column(const Number& begin) : ColumnState(begin) {}

  RNNT_DEVICE NodePair<real> step(const NodePair<real>& share, const Number& neighbour) {
    constexpr bool early = is_early(walk);
    const double emit = (topology == Topology::kRegular ? neighbour : neighbour_before_).value;
    const double blank = own_.value;
    neighbour_before_ = neighbour;
    // With `constrained` the blank is also part of the emit of the column below in the same frame.
    const double used = topology == Topology::kConstrained ? (early ? sent_ : neighbour).value : 0;
    const Mass mass = split_mass(blank + emit, share.first);
    sent_.value = mass.emit;
    own_.value = mass.blank;
    if (early) return {static_cast<real>(emit), static_cast<real>(blank + used)};
    return {static_cast<real>(mass.emit), static_cast<real>(mass.blank + used)};
  }
};

// beta, from the logarithms px and py of a node's arcs; the pair returned begins with the share.
template <typename real, Topology topology>
class Column<real, topology, Walk::kLateSums> : public ColumnState<Probability<real>> {
  using State = ColumnState<Probability<real>>;

 public:
  using typename State::Number;
  RNNT_DEVICE explicit Column(const Number& begin) : State(begin) {}

  RNNT_DEVICE NodePair<real> step(const NodePair<real>& arcs, const Number& neighbour) {
    // The emit of `constrained` also takes a blank of the same frame.
    constexpr bool same_frame =
        topology == Topology::kRegular || topology == Topology::kConstrained;
    const Number px = Number::exp(arcs.first), py = Number::exp(arcs.second);
    const Number arriving = same_frame ? neighbour : this->neighbour_before_;
    this->neighbour_before_ = neighbour;
    const Number stayed = this->own_ * py;
    NodePair<real> result{};
    this->own_ = Number::add_shared(arriving * px, stayed, result.first);
    this->sent_ = topology == Topology::kConstrained ? stayed : this->own_;
    return result;
  }
};

// alpha, likewise; the share is that of the emit among the arcs that lead to the node.
template <typename real, Topology topology>
class Column<real, topology, Walk::kEarlySums> : public ColumnState<Probability<real>> {
  using State = ColumnState<Probability<real>>;

 public:
  using typename State::Number;
  RNNT_DEVICE explicit Column(const Number& begin) : State(Number::zero()), stayed_(begin) {}

  RNNT_DEVICE NodePair<real> step(const NodePair<real>& arcs, const Number& neighbour) {
    const Number px = Number::exp(arcs.first), py = Number::exp(arcs.second);
    Number emitted = topology == Topology::kRegular ? neighbour : this->neighbour_before_;
    if (topology == Topology::kConstrained) emitted = emitted * py_before_;
    this->neighbour_before_ = neighbour;
    py_before_ = py;
    NodePair<real> result{};
    this->own_ = Number::add_shared(emitted, stayed_, result.first);
    stayed_ = this->own_ * py;
    this->sent_ = this->own_ * px;
    return result;
  }

  RNNT_DEVICE void normalise() {
    State::normalise();
    stayed_.normalise();
  }

 private:
  Number stayed_;
  Number py_before_ = Number::one();
};

}  // namespace pruned_rnnt::cuda
