// The four transducer topologies (`rnnt_type` of the ops), for the CPU and CUDA alike.
#pragma once

#include <type_traits>

#include "stable.h"

namespace pruned_rnnt {

enum class Topology : int64_t { kRegular = 0, kModified = 1, kConstrained = 2, kRna = 3 };

// Whether the last transition of a path may be a symbol that takes the last frame with it.
constexpr bool ends_with_symbol(Topology topology) {
  return topology == Topology::kModified || topology == Topology::kConstrained;
}

// Calls work(std::integral_constant<Topology, ...>) for the topology of that number.
template <typename Work>
void dispatch_topology(int64_t rnnt_type, Work&& work) {
  switch (static_cast<Topology>(rnnt_type)) {
    case Topology::kRegular:
      return work(std::integral_constant<Topology, Topology::kRegular>());
    case Topology::kModified:
      return work(std::integral_constant<Topology, Topology::kModified>());
    case Topology::kConstrained:
      return work(std::integral_constant<Topology, Topology::kConstrained>());
    case Topology::kRna:
      return work(std::integral_constant<Topology, Topology::kRna>());
    default:
      STD_TORCH_CHECK(false, "rnnt_type has no topology of number ", rnnt_type);
  }
}

}  // namespace pruned_rnnt
