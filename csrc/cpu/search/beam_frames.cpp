// beam_frames: modified beam search, frame by frame. Contract:
// pruned_rnnt/ops/search/search_frames.py.
//
// Rows with the same context share their log-probabilities.
//
// Axes: N utterances, T frames, B rows of a beam, C symbols of a context, P predictor width, D
// joiner width, V vocabulary.
#include <cmath>
#include <vector>

#include "contracts/search.h"
#include "cpu/common/log_sum_exp.h"
#include "cpu/search/best_extensions.h"
#include "cpu/search/search_model.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

// Of ops/search/beam_rows.py.
constexpr uint64_t kHashMultiplier = 6364136223846793005u;

// All of a batch; the arrays of the op's contract.
struct Batch {
  const float* am;
  const int64_t* lengths;
  const float* fusion;  // or null
  int64_t N, T, B;
  float* score;
  int64_t *hash, *length;
  float* lm;
  int64_t* context;
  int64_t *parent, *symbol;
  float* added;
};

struct Row {
  float score;
  uint64_t hash;
  int64_t length;
  int64_t entry;  // of the context
};

struct AddRows {
  static PRUNED_RNNT_INLINE void run(const float* x, const float* y, int64_t size, float* sum) {
#pragma omp simd
    for (int64_t v = 0; v < size; ++v) sum[v] = x[v] + y[v];
  }
};

struct SubtractFromRow {
  static PRUNED_RNNT_INLINE void run(float* x, int64_t size, Normaliser<float> normaliser) {
#pragma omp simd
    for (int64_t v = 0; v < size; ++v) x[v] = (x[v] - normaliser.shift) - normaliser.log_sum;
  }
};

// Searches utterances first .. last in step, so that the weights are read once for all of them.
class Search {
 public:
  Search(const SearchModel& model, const Batch& batch, int64_t first, int64_t last)
      : model_(model),
        batch_(batch),
        first_(first),
        last_(last),
        contexts_(model.predictor),
        rows_((last - first) * batch.B),
        grown_(batch.B),
        logits_of_(rows_.size()),
        fused_(batch.fusion == nullptr ? 0 : model.V),
        best_(batch.B) {
    for (int64_t v = 0; v < model.V; ++v) {
      if (model.silent[v]) silent_.push_back(v);
    }
  }

  // Returns the frame at which it stopped.
  int64_t run(int64_t t) {
    load();
    bool stop = false;
    for (; t < batch_.T && !stop; ++t) {
      compute_log_probs(t);
      for (int64_t n = first_; n < last_; ++n) {
        const bool changed = t < batch_.lengths[n] ? grow(n, t) : stay(n, t);
        stop |= changed && batch_.fusion != nullptr;
      }
      contexts_.compute();
      contexts_.trim(&rows_);
    }
    store();
    return t;
  }

 private:
  Row* beam(int64_t n) { return rows_.data() + (n - first_) * batch_.B; }

  void load() {
    const int64_t C = model_.predictor.places;
    for (size_t k = 0; k < rows_.size(); ++k) {
      const int64_t r = first_ * batch_.B + static_cast<int64_t>(k);
      rows_[k] = {batch_.score[r], static_cast<uint64_t>(batch_.hash[r]), batch_.length[r],
                  contexts_.add(batch_.context + r * C, batch_.lm + r * model_.D)};
    }
  }

  void store() const {
    const int64_t C = model_.predictor.places;
    for (size_t k = 0; k < rows_.size(); ++k) {
      const int64_t r = first_ * batch_.B + static_cast<int64_t>(k);
      const Row& row = rows_[k];
      batch_.score[r] = row.score;
      batch_.hash[r] = static_cast<int64_t>(row.hash);
      batch_.length[r] = row.length;
      const int64_t* context = contexts_.context(row.entry);
      std::copy(context, context + C, batch_.context + r * C);
      const float* lm = contexts_.projected(row.entry);
      std::copy(lm, lm + model_.D, batch_.lm + r * model_.D);
    }
  }

  // Fills logits_ with the log-probabilities after all contexts of the beams, and logits_of_ with
  // the row of logits_ for each row of the beams.
  void compute_log_probs(int64_t t) {
    const int64_t D = model_.D, V = model_.V;
    int64_t count = 0;
    hidden_.resize(rows_.size() * D);
    for (int64_t n = first_; n < last_; ++n) {
      if (t >= batch_.lengths[n]) continue;
      const float* am = batch_.am + (n * batch_.T + t) * D;
      const Row* rows = beam(n);
      int64_t* logits_of = logits_of_.data() + (n - first_) * batch_.B;
      for (int64_t b = 0; b < batch_.B; ++b) {
        if (is_dead(rows[b])) continue;
        const int64_t same = earlier_with_context(rows, b);
        logits_of[b] = same < b ? logits_of[same] : count;
        if (same < b) continue;
        model_.compute_hidden(am, contexts_.projected(rows[b].entry), hidden_.data() + count * D);
        ++count;
      }
    }
    logits_.resize(rows_.size() * V);
    model_.compute_logits(hidden_.data(), count, logits_.data());
    parallel_tasks(count, rows_per_task(V), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) to_log_probs(logits_.data() + r * V);
    });
  }

  // The first live row with the context of row b.
  int64_t earlier_with_context(const Row* rows, int64_t b) const {
    int64_t other = 0;
    while (other < b && (is_dead(rows[other]) || rows[other].entry != rows[b].entry)) ++other;
    return other;
  }

  void to_log_probs(float* x) const {
    const int64_t V = model_.V, blank = model_.blank;
    if (model_.hat) {
      const float blank_logit = x[blank];
      Normaliser<float> symbols = run_vectorised<LogSumExpNonBlank>(x, V, blank);
      symbols.log_sum -= log_sigmoid(-blank_logit);
      run_vectorised<SubtractFromRow>(x, V, symbols);
      x[blank] = log_sigmoid(blank_logit);
    } else {
      run_vectorised<SubtractFromRow>(x, V, run_vectorised<LogSumExp>(x, V));
    }
    for (const int64_t symbol : silent_) x[symbol] = minus_infinity<float>;
  }

  static bool is_dead(const Row& row) { return row.score == minus_infinity<float>; }

  // One frame of an utterance; false if all of its rows stay as they are but for their scores.
  bool grow(int64_t n, int64_t t) {
    const int64_t B = batch_.B, V = model_.V;
    Row* rows = beam(n);
    best_.clear();
    for (int64_t b = 0; b < B; ++b) {
      if (is_dead(rows[b])) continue;
      const float* added = logits_.data() + logits_of_[(n - first_) * B + b] * V;
      if (batch_.fusion != nullptr) {
        run_vectorised<AddRows>(added, batch_.fusion + (n * B + b) * V, V, fused_.data());
        added = fused_.data();
      }
      run_vectorised<OfferRow>(added, V, rows[b].score, b, &best_);
    }
    const std::vector<Extension>& found = best_.found();
    bool changed = false;
    for (int64_t b = 0; b < B; ++b) {
      const bool is_live = b < static_cast<int64_t>(found.size());
      const Extension extension =
          is_live ? found[b] : Extension{minus_infinity<float>, 0.0f, b, model_.blank};
      const bool emits = extension.symbol != model_.blank;
      changed |= emits || extension.parent != b;
      Row row = rows[extension.parent];
      row.score = extension.score;
      if (emits) {
        row.hash = row.hash * kHashMultiplier + static_cast<uint64_t>(extension.symbol) + 1;
        ++row.length;
        row.entry = contexts_.after(row.entry, extension.symbol);
      }
      grown_[b] = row;
      write(n, t, b,
            {extension.score, extension.added, extension.parent, emits ? extension.symbol : -1});
    }
    std::copy(grown_.begin(), grown_.end(), rows);
    if (changed) merge_equal(rows);
    return changed;
  }

  // A frame after the end of an utterance.
  bool stay(int64_t n, int64_t t) {
    for (int64_t b = 0; b < batch_.B; ++b) write(n, t, b, {0.0f, 0.0f, b, -1});
    return false;
  }

  void write(int64_t n, int64_t t, int64_t b, const Extension& extension) {
    const int64_t place = (n * batch_.T + t) * batch_.B + b;
    batch_.parent[place] = extension.parent;
    batch_.symbol[place] = extension.symbol;
    batch_.added[place] = extension.added;
  }

  // Moves the summed probability of equal sequences to the first of them.
  void merge_equal(Row* rows) const {
    for (int64_t b = 0; b < batch_.B; ++b) {
      if (is_dead(rows[b])) continue;
      double sum = 1;  // relative to the first, which has the highest score
      for (int64_t other = b + 1; other < batch_.B; ++other) {
        if (is_dead(rows[other]) || rows[other].hash != rows[b].hash) continue;
        sum += std::exp(static_cast<double>(rows[other].score) - rows[b].score);
        rows[other].score = minus_infinity<float>;
      }
      if (sum != 1) rows[b].score = static_cast<float>(rows[b].score + std::log(sum));
    }
  }

  const SearchModel& model_;
  const Batch& batch_;
  int64_t first_, last_;
  ContextTable contexts_;
  std::vector<Row> rows_, grown_;
  std::vector<int64_t> logits_of_, silent_;
  std::vector<float> hidden_, logits_, fused_;
  BestExtensions best_;
};

void beam_frames(const View& am, const View& lengths, int64_t begin, const OptionalView& fusion,
                 const SearchModelArguments& arguments, const BeamState& state,
                 const BeamSteps& steps, const View& end) {
  const int64_t N = am.size(0);
  const SearchModel model(arguments);
  const Batch batch{data_of<float>(am),
                    data_of<int64_t>(lengths),
                    data_or_null<float>(fusion),
                    N,
                    am.size(1),
                    state.score.size(1),
                    mutable_data_of<float>(state.score),
                    mutable_data_of<int64_t>(state.hash),
                    mutable_data_of<int64_t>(state.length),
                    mutable_data_of<float>(state.lm),
                    mutable_data_of<int64_t>(state.context),
                    mutable_data_of<int64_t>(steps.parent),
                    mutable_data_of<int64_t>(steps.symbol),
                    mutable_data_of<float>(steps.added)};
  int64_t* stopped = mutable_data_of<int64_t>(end);
  if (batch.fusion != nullptr) {
    // In one piece: all utterances stop at the same frame.
    *stopped = Search(model, batch, 0, N).run(begin);
    return;
  }
  const int64_t threads = torch::stable::get_num_threads();
  parallel_tasks(N, (N + threads - 1) / threads, [&](int64_t first, int64_t last) {
    Search(model, batch, first, last).run(begin);
  });
  *stopped = batch.T;
}

PRUNED_RNNT_CPU_OP(beam_frames)

}  // namespace
}  // namespace pruned_rnnt
