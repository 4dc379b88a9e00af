// How the two arcs of a node share the paths behind it, in one number a node.
//
// The shares of a node's arcs sum to 1, and the smaller one is kept, so that neither loses digits:
// s with a clear sign bit is the share of the emit, with a set one -s is that of the blank. The
// recursion that these numbers belong to is stated in pruned_rnnt/ops/lattice/lattice.py.
#pragma once

#include "log_math.h"

namespace pruned_rnnt {

struct ArcShares {
  double emit, blank;
};

template <typename real>
PRUNED_RNNT_INLINE ArcShares split_share(real share) {
  using integer = typename RealTraits<real>::integer;
  const double smaller = std::fabs(share), larger = 1 - smaller;
  const bool blank_is_smaller = bits_as<integer>(share) < 0;
  return {blank_is_smaller ? larger : smaller, blank_is_smaller ? smaller : larger};
}

// log(exp(emitted) + exp(stayed)), and how the two share it. The sum is carried in double: rounded
// at its own size, which grows with the input, it would leave the shares few digits. What is added
// to the larger of the two is below 1 and needs no more than `real`.
template <typename real>
PRUNED_RNNT_INLINE double log_add_shared(double emitted, double stayed, real& share) {
  const double larger = emitted > stayed ? emitted : stayed;
  const double distance = emitted == stayed ? 0 : -std::fabs(emitted - stayed);
  const real smaller = exp_of_nonpositive(static_cast<real>(distance));
  const real part = smaller / (1 + smaller);
  share = emitted < stayed ? part : -part;
  return larger + static_cast<double>(log_one_plus(smaller));
}

}  // namespace pruned_rnnt
