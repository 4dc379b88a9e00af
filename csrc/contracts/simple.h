// Contracts of the trivial joiner's ops, pruned_rnnt/ops/simple.
//
// Axes: N batch, T frames, U symbols, V vocabulary; T', U' and V' with the padding of the products.
#pragma once

#include "arguments.h"

namespace pruned_rnnt::contracts {

// CPU kernels store exponentials in one part, without padding.
inline Type stored_type(const Arguments& in) { return in.on_cpu() ? Type::kReal : Type::kStored; }

struct SimpleSizes {
  Size N{"N"}, T{"T"}, U{"U"}, V{"V"}, padded_T{"T'"}, padded_U{"U'"}, padded_V{"V'"};
  Size am_parts{"parts of am"}, lm_parts{"parts of lm"};

  // am and lm.
  void inputs(Arguments& in) {
    in.tensor("am", Type::kScalar, {N, T, V});
    in.tensor("lm", Type::kScalar, {N, U + 1, V});
  }
  // am_exp and lm_exp.
  void exponentials(Arguments& in) {
    in.tensor("am_exp", Type::kStored, {N, am_parts, padded_T, padded_V});
    in.tensor("lm_exp", Type::kStored, {N, lm_parts, padded_U, padded_V});
    in.require((am_parts.value() == 1 && lm_parts.value() == 1) ||
                   (am_parts.value() == 2 && lm_parts.value() == 3),
               "`am_exp` and `lm_exp` must have one part each, or two and three");
  }
  // grad_loss, gx and gy.
  void upstream(Arguments& in) {
    in.tensor("grad_loss", Type::kReal, {N});
    in.tensor("gx", Type::kReal, {N, T, U + 1});
    in.tensor("gy", Type::kReal, {N, T, U + 1});
  }
  void product(Arguments& in) {
    // The CPU kernels have no padding.
    const Extent columns = in.on_cpu() ? U + 1 : Extent(U, 1, true);
    in.tensor("product", Type::kReal, {N, T, columns});
  }
  // lm_lse, am_lse and log_q.
  void smoothing(Arguments& in) {
    in.optional("lm_lse", Type::kReal, {N, U + 1});
    const bool am_only = in.optional("am_lse", Type::kReal, {N, T}) != nullptr;
    const bool has_prior = in.optional("log_q", Type::kReal, {V}) != nullptr;
    in.require(!am_only || has_prior, "`am_lse` needs `log_q`");
  }
  // targets, logit_lengths, target_lengths and blank.
  void targets(Arguments& in) {
    Size columns{"columns of targets"};
    in.tensor("targets", Type::kInt32, {N, columns});
    lengths(in);
    in.number("blank", 0, V.value() - 1);
  }
  void lengths(Arguments& in) {
    in.tensor("logit_lengths", Type::kInt32, {N});
    in.tensor("target_lengths", Type::kInt32, {N});
  }
};

inline void exp_rows(Arguments& in) {
  Size N{"N"}, L{"L"}, V{"V"}, parts{"parts"}, padded_L{"L'"}, padded_V{"V'"};
  in.tensor("x", Type::kScalar, {N, L, V});
  in.tensor("lengths", Type::kInt32, {N});
  in.number("extra", 0, 1);
  in.tensor("row_max", Type::kReal, {N, L});
  in.tensor("row_lse", Type::kReal, {N, L});
  in.tensor("x_exp", stored_type(in), {N, parts, padded_L, padded_V});
  in.require(parts.value() >= 1 && parts.value() <= 3, "`x_exp` must have one, two or three parts");
  in.require(padded_L.value() >= L.value() && padded_V.value() >= V.value(),
             "`x_exp` must have all rows and columns of `x`");
  in.require(!in.on_cpu() || (parts.value() == 1 && padded_L.value() == L.value() &&
                              padded_V.value() == V.value()),
             "`x_exp` must have one part, shaped like `x`, on the CPU");
}

inline void simple_product(Arguments& in) {
  SimpleSizes sizes;
  sizes.exponentials(in);
  in.tensor("product", Type::kReal, {sizes.N, sizes.padded_T, sizes.padded_U});
}

inline void simple_sums(Arguments& in) {
  SimpleSizes sizes;
  auto& [N, T, U, V, padded_T, padded_U, padded_V, am_parts, lm_parts] = sizes;
  in.tensor("weights", Type::kStored, {N, padded_T, lm_parts, padded_U});
  sizes.exponentials(in);
  in.tensor("lm_sum", Type::kReal, {N, padded_U, padded_V});
  in.tensor("am_sum", Type::kReal, {N, padded_T, padded_V});
}

inline void simple_log_probs(Arguments& in) {
  SimpleSizes sizes;
  sizes.inputs(in);
  auto& [N, T, U, V, padded_T, padded_U, padded_V, am_parts, lm_parts] = sizes;
  in.tensor("am_max", Type::kReal, {N, T});
  in.tensor("lm_max", Type::kReal, {N, U + 1});
  sizes.product(in);
  sizes.smoothing(in);
  sizes.targets(in);
  for (const char* name : {"px", "py", "logz"}) in.tensor(name, Type::kReal, {N, T, U + 1});
}

inline void simple_weights(Arguments& in) {
  SimpleSizes sizes;
  Size parts{"parts"};
  sizes.upstream(in);
  sizes.product(in);
  sizes.lengths(in);
  const Extent columns = in.on_cpu() ? sizes.U + 1 : Extent(sizes.U, 1, true);
  in.tensor("weights", stored_type(in), {sizes.N, sizes.T, parts, columns});
  in.require(parts.value() == 1 || (parts.value() == 3 && !in.on_cpu()),
             "`weights` must have one part, or three on CUDA");
}

inline void simple_backward(Arguments& in) {
  SimpleSizes sizes;
  auto& [N, T, U, V, padded_T, padded_U, padded_V, am_parts, lm_parts] = sizes;
  sizes.upstream(in);
  sizes.inputs(in);
  in.tensor("am_max", Type::kReal, {N, T});
  in.tensor("lm_max", Type::kReal, {N, U + 1});
  sizes.product(in);
  in.tensor("logz", Type::kReal, {N, T, U + 1});
  in.tensor("am_sum", Type::kReal, {N, padded_T, padded_V});
  in.tensor("lm_sum", Type::kReal, {N, padded_U, padded_V});
  in.require(padded_T.value() >= T.value() && padded_U.value() > U.value() &&
                 padded_V.value() >= V.value(),
             "`am_sum` and `lm_sum` must have all rows and columns of `am` and `lm`");
  in.require(!in.on_cpu() || (padded_T.value() == T.value() && padded_U.value() == U.value() + 1 &&
                              padded_V.value() == V.value()),
             "`am_sum` and `lm_sum` must be shaped like `am` and `lm` on the CPU");
  sizes.smoothing(in);
  sizes.targets(in);
  const Layout rows = in.on_cpu() ? Layout::kContiguous : Layout::kPitched;
  in.tensor("grad_am", Type::kScalar, {N, T, V}, rows);
  in.tensor("grad_lm", Type::kScalar, {N, U + 1, V}, rows);
}

}  // namespace pruned_rnnt::contracts
