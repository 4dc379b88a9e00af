// The stateless predictor's projected output after each context of a search, computed once.
#pragma once

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/search/row_product.h"

namespace pruned_rnnt {

// Axes: C places of a context, V symbols, P predictor width, D joiner width.
struct ContextPredictor {
  // (C,V+1,P): what the symbol at each place adds to the output; the last one is -1, no symbol.
  const float* tables;
  const float *weight, *bias;  // (D,P), (D)
  int64_t places, symbols, width, outputs;

  // The output after a context: a sum over its places, and for several a ReLU.
  void predict(const int64_t* context, float* output) const {
    for (int64_t place = 0; place < places; ++place) {
      const int64_t symbol = context[place] < 0 ? symbols : context[place];
      const float* added = tables + (place * (symbols + 1) + symbol) * width;
      for (int64_t p = 0; p < width; ++p) output[p] = place == 0 ? added[p] : output[p] + added[p];
    }
    if (places == 1) return;
    for (int64_t p = 0; p < width; ++p) output[p] = output[p] < 0 ? 0.0f : output[p];
  }
};

class ContextTable {
 public:
  explicit ContextTable(const ContextPredictor& predictor) : predictor_(predictor) {}

  int64_t size() const { return static_cast<int64_t>(contexts_.size()) / predictor_.places; }
  const int64_t* context(int64_t entry) const {
    return contexts_.data() + entry * predictor_.places;
  }
  // (D,); of new entries only after `compute`.
  const float* projected(int64_t entry) const {
    return projected_.data() + entry * predictor_.outputs;
  }

  // The entry of a context with a known output.
  int64_t add(const int64_t* context, const float* projected) {
    const int64_t entry = entry_of(context);
    projected_.resize(size() * predictor_.outputs);
    std::copy(projected, projected + predictor_.outputs,
              projected_.data() + entry * predictor_.outputs);
    computed_ = size();
    return entry;
  }

  // The entry after one more symbol.
  int64_t after(int64_t entry, int64_t symbol) {
    next_.assign(context(entry) + 1, context(entry) + predictor_.places);
    next_.push_back(symbol);
    return entry_of(next_.data());
  }

  // The outputs of all entries since the last call.
  void compute() {
    const int64_t count = size() - computed_;
    if (count == 0) return;
    predicted_.resize(count * predictor_.width);
    projected_.resize(size() * predictor_.outputs);
    for (int64_t k = 0; k < count; ++k) {
      predictor_.predict(context(computed_ + k), predicted_.data() + k * predictor_.width);
    }
    RowProduct{predicted_.data(),
               predictor_.weight,
               predictor_.bias,
               count,
               predictor_.width,
               predictor_.outputs,
               projected_.data() + computed_ * predictor_.outputs}
        .run();
    computed_ = size();
  }

  // Drops all contexts but those of the rows, which have an `entry` each, if there are many.
  template <typename Row>
  void trim(std::vector<Row>* rows) {
    if (size() <= std::max<int64_t>(kMost, kMostOfRow * static_cast<int64_t>(rows->size()))) return;
    ContextTable kept(predictor_);
    for (Row& row : *rows) row.entry = kept.add(context(row.entry), projected(row.entry));
    *this = std::move(kept);
  }

 private:
  // Contexts that are kept, in all and for each row: some megabytes.
  static constexpr int64_t kMost = 1 << 11, kMostOfRow = 8;

  int64_t entry_of(const int64_t* context) {
    int64_t key = 0;
    for (int64_t place = 0; place < predictor_.places; ++place) {
      key = key * (predictor_.symbols + 1) + context[place] + 1;
    }
    const auto [found, is_new] = entries_.emplace(key, size());
    if (is_new) contexts_.insert(contexts_.end(), context, context + predictor_.places);
    return found->second;
  }

  ContextPredictor predictor_;
  std::unordered_map<int64_t, int64_t> entries_;
  std::vector<int64_t> contexts_, next_;
  std::vector<float> projected_, predicted_;
  int64_t computed_ = 0;
};

}  // namespace pruned_rnnt
