// The four transducer topologies (`rnnt_type` of the ops), for the CPU and CUDA alike.
#pragma once

#include "stable.h"

namespace pruned_rnnt {

enum class Topology : int64_t { kRegular = 0, kModified = 1, kConstrained = 2, kRna = 3 };

// Whether a path may end with an emit that also takes the last frame.
constexpr bool ends_with_symbol(Topology topology) {
  return topology == Topology::kModified || topology == Topology::kConstrained;
}

// Whether each frame has exactly one arc, an emit or a blank.
constexpr bool one_arc_a_frame(Topology topology) {
  return topology == Topology::kModified || topology == Topology::kRna;
}

// The most columns that a path can advance from one frame to the next inside a band of S columns.
constexpr int64_t largest_step(Topology topology, int64_t S) {
  return topology == Topology::kRegular ? S - 1 : 1;
}

// Calls work(std::integral_constant<Topology, ...>) for the topology with this number.
template <typename Work>
void dispatch_topology(int64_t rnnt_type, Work&& work) {
  const bool found = dispatch_value<Topology::kRegular, Topology::kModified, Topology::kConstrained,
                                    Topology::kRna>(static_cast<Topology>(rnnt_type), work);
  STD_TORCH_CHECK(found, "unknown rnnt_type number ", rnnt_type);
}

}  // namespace pruned_rnnt
