// The shares of a node's two arcs in the paths that go on from it. They sum to 1; of the two, the
// smaller one s is stored, so that neither loses digits: as s for the emit, as -s (sign bit set)
// for the blank. The recursion is stated in pruned_rnnt/ops/lattice/lattice.py.
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

// log(exp(emitted) + exp(stayed)), and the shares of the two. The sum is double: rounded to float
// at its own size, which grows with the input, it would leave the shares few digits. The part added
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
