// The four transducer topologies (`rnnt_type` of the ops), as steps of the recursion stated in
// pruned_rnnt/ops/lattice.py.
#pragma once

#include "cuda/probability.cuh"
#include "topology.h"

namespace pruned_rnnt {
namespace cuda {

// One column u of the lattice as a thread walks along its frames, forward for alpha and backward
// for beta. A thread meets its column's frames in order, and for each gets what the neighbouring
// column (u-1 forward, u+1 backward) `sends` from the same frame.
template <typename real, Topology topology, bool backward>
class Column {
  using Number = Probability<real>;

 public:
  // `first` is whether the recursion starts in this column: at the node before its first step.
  __device__ __forceinline__ explicit Column(bool first)
      : own_(first ? Number::one() : Number::zero()), blank_before_(own_) {}

  // Returns alpha or beta of the next node of the column, from the logarithms of its arcs.
  __device__ __forceinline__ real step(real log_px, real log_py, const Number& neighbour) {
    // Only `regular` emits inside a frame; otherwise what comes from the neighbour is a frame old,
    // except that a blank of the same frame belongs to an emit of `constrained`.
    constexpr bool same_frame =
        topology == Topology::kRegular || (backward && topology == Topology::kConstrained);
    const Number px = Number::exp(log_px), py = Number::exp(log_py);
    const Number arriving = same_frame ? neighbour : neighbour_before_;
    neighbour_before_ = neighbour;
    Number value;
    if (backward) {
      const Number stayed = own_ * py;
      value = stayed + arriving * px;
      own_ = value;
      sent_ = topology == Topology::kConstrained ? stayed : value;
    } else {
      value = own_ + arriving;
      if (topology == Topology::kConstrained) {
        value = value * blank_before_;
        blank_before_ = py;
        own_ = value;
      } else {
        own_ = value * py;
      }
      sent_ = value * px;
    }
    return value.log();
  }

  // For the neighbour's step at the frame of the last step.
  __device__ __forceinline__ const Number& sent() const { return sent_; }

  // To be called every few steps.
  __device__ __forceinline__ void normalise() {
    own_.normalise();
    neighbour_before_.normalise();
    sent_.normalise();
  }

 private:
  Number own_, blank_before_;
  Number neighbour_before_ = Number::zero();
  Number sent_ = Number::zero();
};

}  // namespace cuda
}  // namespace pruned_rnnt
