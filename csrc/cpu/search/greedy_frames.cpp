// greedy_frames: greedy search. Contract: pruned_rnnt/ops/search/search_frames.py.
//
// Until the next symbol the predictor's output does not change: as long as few utterances are left,
// the joiner computes some frames of each at once, and those after a symbol are discarded.
//
// Axes: N utterances, T frames, M symbols of a frame, C symbols of a context, D joiner width, V
// vocabulary.
#include <algorithm>
#include <cmath>
#include <vector>

#include "contracts/search.h"
#include "cpu/common/log_sum_exp.h"
#include "cpu/search/search_model.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

// All of a batch; the arrays of the op's contract.
struct Batch {
  const float* am;
  const int64_t* lengths;
  int64_t N, T, M;
  float* lm;
  int64_t* context;
  int64_t* symbols;
  float* scores;
};

// Where the search of an utterance is: its frame, and the symbols emitted in this frame.
struct Path {
  int64_t n, frame, end, count;
  int64_t entry;  // of the context
};

struct Choice {
  int64_t symbol;
  float score;
};

// The first place of a value, `size` without one.
struct FirstEqual {
  static PRUNED_RNNT_INLINE int64_t run(const float* x, int64_t size, float value) {
    const int32_t none = static_cast<int32_t>(size);
    int32_t first = none;
#pragma omp simd reduction(min : first)
    for (int32_t v = 0; v < none; ++v) {
      const int32_t place = x[v] == value ? v : none;
      first = place < first ? place : first;
    }
    return first;
  }
};

// Searches utterances first .. last together, so that the weights are read once for all of them.
class Search {
 public:
  Search(const SearchModel& model, const Batch& batch, int64_t first, int64_t last)
      : model_(model), batch_(batch), contexts_(model.predictor) {
    for (int64_t n = first; n < last; ++n) load(n);
  }

  void run() {
    for (;;) {
      active_.clear();
      for (Path& path : paths_) {
        if (path.frame < path.end) active_.push_back(&path);
      }
      if (active_.empty()) break;
      compute_spans();
      for (size_t k = 0; k < active_.size(); ++k) follow(k);
      contexts_.compute();
      contexts_.trim(&paths_);
    }
    for (const Path& path : paths_) store(path);
  }

 private:
  void load(int64_t n) {
    const int64_t size = batch_.T * batch_.M;
    std::fill_n(batch_.symbols + n * size, size, int64_t{-1});
    std::fill_n(batch_.scores + n * size, size, 0.0f);
    const int64_t entry =
        contexts_.add(batch_.context + n * model_.predictor.places, batch_.lm + n * model_.D);
    paths_.push_back({n, 0, std::min(batch_.lengths[n], batch_.T), 0, entry});
  }

  void store(const Path& path) const {
    const int64_t C = model_.predictor.places, D = model_.D;
    std::copy_n(contexts_.context(path.entry), C, batch_.context + path.n * C);
    std::copy_n(contexts_.projected(path.entry), D, batch_.lm + path.n * D);
  }

  // Fills logits_ with the next frames of the active paths, as many as fill a tile of the product;
  // those of path k are rows begins_[k] .. begins_[k + 1].
  void compute_spans() {
    const int64_t count = static_cast<int64_t>(active_.size()), D = model_.D;
    const int64_t span = (RowProduct::kTile + count - 1) / count;
    hidden_.resize(count * span * D);
    begins_.assign(1, 0);
    int64_t rows = 0;
    for (const Path* path : active_) {
      const int64_t end = std::min(path->frame + span, path->end);
      for (int64_t t = path->frame; t < end; ++t, ++rows) {
        model_.compute_hidden(batch_.am + (path->n * batch_.T + t) * D,
                              contexts_.projected(path->entry), hidden_.data() + rows * D);
      }
      begins_.push_back(rows);
    }
    logits_.resize(count * span * model_.V);
    model_.compute_logits(hidden_.data(), rows, logits_.data());
  }

  // The path through its frames of logits_, until its next symbol.
  void follow(size_t k) {
    Path& path = *active_[k];
    for (int64_t row = begins_[k]; row < begins_[k + 1]; ++row) {
      const Choice choice = choose(logits_.data() + row * model_.V);
      const bool emits = choice.symbol != model_.blank && !model_.silent[choice.symbol];
      const int64_t place = (path.n * batch_.T + path.frame) * batch_.M + path.count;
      batch_.scores[place] = choice.score;
      if (emits) {
        batch_.symbols[place] = choice.symbol;
        path.entry = contexts_.after(path.entry, choice.symbol);
        ++path.count;
      }
      if (!emits || path.count == batch_.M) {
        ++path.frame;
        path.count = 0;
      }
      if (emits) return;
    }
  }

  // The most probable symbol or blank and its log-probability, or the first NaN.
  Choice choose(const float* x) const {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const int64_t V = model_.V, blank = model_.blank;
    if (!model_.hat) {
      const Normaliser<float> all = run_vectorised<LogSumExp>(x, V);
      if (!std::isfinite(all.log_sum)) return {0, nan};
      return {run_vectorised<FirstEqual>(x, V, all.shift), 0.0f - all.log_sum};
    }
    const Choice silence{blank, log_sigmoid(x[blank])};
    if (V == 1) return silence;
    if (std::isnan(silence.score)) return {0, nan};
    const Normaliser<float> symbols = run_vectorised<LogSumExpNonBlank>(x, V, blank);
    if (!std::isfinite(symbols.log_sum)) return {blank == 0 ? 1 : 0, nan};
    Choice best{run_vectorised<FirstEqual>(x, blank, symbols.shift),
                log_sigmoid(-x[blank]) - symbols.log_sum};
    if (best.symbol == blank) {
      const float* above = x + blank + 1;
      best.symbol += 1 + run_vectorised<FirstEqual>(above, V - blank - 1, symbols.shift);
    }
    if (best.score == silence.score) return best.symbol < blank ? best : silence;
    return best.score > silence.score ? best : silence;
  }

  const SearchModel& model_;
  const Batch& batch_;
  ContextTable contexts_;
  std::vector<Path> paths_;
  std::vector<Path*> active_;
  std::vector<int64_t> begins_;
  std::vector<float> hidden_, logits_;
};

void greedy_frames(const View& am, const View& lengths, const SearchModelArguments& arguments,
                   const PredictorState& state, const View& symbols, const View& scores) {
  const SearchModel model(arguments);
  const Batch batch{data_of<float>(am),
                    data_of<int64_t>(lengths),
                    am.size(0),
                    am.size(1),
                    symbols.size(2),
                    mutable_data_of<float>(state.lm),
                    mutable_data_of<int64_t>(state.context),
                    mutable_data_of<int64_t>(symbols),
                    mutable_data_of<float>(scores)};
  const int64_t threads = torch::stable::get_num_threads();
  parallel_tasks(batch.N, (batch.N + threads - 1) / threads,
                 [&](int64_t first, int64_t last) { Search(model, batch, first, last).run(); });
}

PRUNED_RNNT_CPU_OP(greedy_frames)

}  // namespace
}  // namespace pruned_rnnt
