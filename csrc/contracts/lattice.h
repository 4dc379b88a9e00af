// Contract of the recursion over whole lattices, pruned_rnnt/ops/lattice/lattice.py.
#pragma once

#include "arguments.h"
#include "topology.h"
#include "workspaces.h"

namespace pruned_rnnt::contracts {

inline void lattice(Arguments& in) {
  Size N{"N"}, U{"U"}, T{"T"}, emit_T{"frames of px"};
  in.tensor("px", Type::kReal, {N, U, emit_T});
  in.tensor("py", Type::kReal, {N, U + 1, T});
  in.optional("boundary", Type::kInt32, {N, 4});
  const bool is_regular = static_cast<Topology>(in.number("rnnt_type", 0, 3)) == Topology::kRegular;
  in.require(emit_T.value() == T.value() + (is_regular ? 1 : 0),
             "`px` must have T + 1 frames with the regular topology, and T with the others");
  const int64_t least = cut_elements(N.value(), U.value() + 1, N.value() * T.value());
  in.flat("work", Type::kReal, at_least(least));
  in.tensor("total", Type::kReal, {N});
  in.tensor("gx", Type::kReal, {N, U, emit_T});
  in.tensor("gy", Type::kReal, {N, U + 1, T});
}

}  // namespace pruned_rnnt::contracts
