// The best extensions of the rows of a beam.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/common/rows.h"

namespace pruned_rnnt {

// score: that of the row `parent` plus `added`, the score of `symbol` after it.
struct Extension {
  float score, added;
  int64_t parent, symbol;
};

// The best ones, best first; of equal scores the one that was offered first. As in torch's topk,
// NaN is above all numbers, so that it is seen in the result.
class BestExtensions {
 public:
  explicit BestExtensions(int64_t most) : most_(most) { found_.reserve(most); }

  void clear() { found_.clear(); }
  const std::vector<Extension>& found() const { return found_; }

  // An extension whose score is not above this is not among the best.
  float threshold() const {
    return static_cast<int64_t>(found_.size()) < most_ ? minus_infinity<float>
                                                       : found_.back().score;
  }

  void offer(const Extension& extension) {
    const auto place = std::find_if(found_.begin(), found_.end(), [&](const Extension& other) {
      return is_above(extension.score, other.score);
    });
    if (static_cast<int64_t>(found_.size()) < most_) {
      found_.insert(place, extension);
    } else if (place != found_.end()) {
      std::move_backward(place, found_.end() - 1, found_.end());
      *place = extension;
    }
  }

 private:
  static bool is_above(float one, float other) {
    return one > other || (std::isnan(one) && !std::isnan(other));
  }

  int64_t most_;
  std::vector<Extension> found_;
};

// Offers all symbols after one row; added: their scores, -inf for what is impossible.
struct OfferRow {
  static PRUNED_RNNT_INLINE void run(const float* added, int64_t size, float score, int64_t parent,
                                     BestExtensions* best) {
    constexpr int64_t kBlock = 64;
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, size);
      const float threshold = best->threshold();
      int32_t above = 0;
#pragma omp simd reduction(| : above)
      for (int64_t v = begin; v < end; ++v) above |= !(score + added[v] <= threshold);
      if (above == 0) continue;
      for (int64_t v = begin; v < end; ++v) {
        const float total = score + added[v];
        if (!(total <= best->threshold())) best->offer({total, added[v], parent, v});
      }
    }
  }
};

}  // namespace pruned_rnnt
