// Contracts of the ops that choose a band and gather in it, pruned_rnnt/ops/pruning.
//
// Axes: N batch, T frames, U symbols, S columns of the band, D joiner dimension.
#pragma once

#include "arguments.h"

namespace pruned_rnnt::contracts {

// gx, gy, lengths, s_range and rnnt_type.
inline void occupancies(Arguments& in, Size& N, Size& T, Size& U) {
  in.tensor("gx", Type::kReal, {N, T, U + 1});
  in.tensor("gy", Type::kReal, {N, T, U + 1});
  in.tensor("logit_lengths", Type::kInt32, {N});
  in.tensor("target_lengths", Type::kInt32, {N});
  in.number("s_range", 1, kMostInt32);
  in.number("rnnt_type", 0, 3);
}

inline void prune_bounds(Arguments& in) {
  Size N{"N"}, T{"T"}, U{"U"};
  occupancies(in, N, T, U);
  in.tensor("start", Type::kInt32, {N, T});
}

inline void prune_bounds_exact(Arguments& in) {
  Size N{"N"}, T{"T"}, U{"U"};
  occupancies(in, N, T, U);
  in.tensor("scratch", Type::kInt32, {N, T, U + 1});
  in.tensor("start", Type::kInt32, {N, T});
}

inline void band_gather(Arguments& in) {
  Size N{"N"}, T{"T"}, L{"U + 1"}, S{"s_range"}, D{"D"};
  in.tensor("lm", Type::kScalar, {N, L, D});
  in.tensor("start", Type::kInt32, {N, T});
  in.size("s_range", S);
  in.tensor("out", Type::kScalar, {N, T, S, D});
}

inline void band_gather_backward(Arguments& in) {
  Size N{"N"}, T{"T"}, L{"U + 1"}, S{"S"}, D{"D"};
  in.tensor("grad", Type::kScalar, {N, T, S, D});
  in.tensor("start", Type::kInt32, {N, T});
  in.tensor("grad_lm", Type::kScalar, {N, L, D});
}

}  // namespace pruned_rnnt::contracts
