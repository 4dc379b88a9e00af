// The four transducer topologies (`rnnt_type` of the ops), as steps of the recursion stated in
// pruned_rnnt/ops/lattice.py.
#pragma once

#include "cuda/arithmetic.cuh"
#include "topology.h"

namespace pruned_rnnt {
namespace cuda {

// One column u of the lattice as a thread walks along its frames, forward for alpha and backward
// for beta. A thread meets its column's frames in order, and for each gets what the neighbouring
// column (u-1 forward, u+1 backward) `sends` from the same frame. Numbers are log-probabilities
// with kLogZero for 0.
template <typename real, Topology topology, bool backward>
class Column {
 public:
  // `first` is whether the recursion starts in this column: at the node before its first step.
  __device__ __forceinline__ explicit Column(bool first)
      : own_(first ? real(0) : kLogZero<real>), blank_before_(own_) {}

  // Returns alpha or beta of the next node of the column.
  __device__ __forceinline__ real step(real px, real py, real neighbour) {
    // Only `regular` emits inside a frame; otherwise what comes from the neighbour is a frame old,
    // except that a blank of the same frame belongs to an emit of `constrained`.
    constexpr bool same_frame =
        topology == Topology::kRegular || (backward && topology == Topology::kConstrained);
    const real arriving = same_frame ? neighbour : neighbour_before_;
    neighbour_before_ = neighbour;
    real value;
    if (backward) {
      const real stayed = own_ + py;
      value = log_add(stayed, arriving + px);
      own_ = value;
      sent_ = topology == Topology::kConstrained ? stayed : value;
    } else {
      value = log_add(own_, arriving);
      if (topology == Topology::kConstrained) {
        value += blank_before_;
        blank_before_ = py;
        own_ = value;
      } else {
        own_ = value + py;
      }
      sent_ = value + px;
    }
    return value;
  }

  // For the neighbour's step at the frame of the last step.
  __device__ __forceinline__ real sent() const { return sent_; }

 private:
  real own_, blank_before_;
  real neighbour_before_ = kLogZero<real>;
  real sent_ = kLogZero<real>;
};

}  // namespace cuda
}  // namespace pruned_rnnt
