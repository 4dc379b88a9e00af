// prune_bounds, prune_bounds_exact: the band of every frame by k2's rule, or the best one. Steps,
// notation and limits: pruned_rnnt/ops/pruning/prune_bounds.py.
//
// Axes: N utterances, T frames, U symbols, S columns of the band; s is a first column.
#include <deque>
#include <vector>

#include "contracts/pruning.h"
#include "cpu/common/parallel.h"
#include "log_math.h"
#include "op.h"
#include "topology.h"

namespace pruned_rnnt {
namespace {

// Scores this close to the largest count as equal, so that rounding does not choose the window.
constexpr double kTie = 1e-5;

// Scores of all windows of a frame, summed in double.
class WindowScores {
 public:
  WindowScores(int64_t positions, bool one_arc_a_frame)
      : sums_(positions + 1), one_arc_a_frame_(one_arc_a_frame) {}

  // scores[s] for s = 0..windows-1 from the occupancies (U+1) of one frame.
  template <typename real>
  void compute(const real* gx, const real* gy, int64_t S, int64_t windows, double* scores) {
    const int64_t positions = static_cast<int64_t>(sums_.size()) - 1;
    const int64_t used = std::min(positions, windows - 1 + S);
    sums_[0] = 0;
    for (int64_t u = 0; u < used; ++u) {
      const double emitted = one_arc_a_frame_ ? static_cast<double>(gx[u]) : 0;
      sums_[u + 1] = sums_[u] + static_cast<double>(gy[u]) + emitted;
    }
    for (int64_t s = 0; s < windows; ++s) {
      const double entering = s > 0 && !one_arc_a_frame_ ? static_cast<double>(gx[s - 1]) : 0;
      scores[s] = sums_[std::min(s + S, used)] - sums_[s] - entering;
    }
  }

 private:
  std::vector<double> sums_;
  bool one_arc_a_frame_;
};

// The middle one of the windows that count as the largest; of two the first.
int64_t middle_of_largest(const std::vector<double>& scores, int64_t windows) {
  double largest = minus_infinity<double>;
  for (int64_t s = 0; s < windows; ++s) largest = scores[s] > largest ? scores[s] : largest;
  int64_t count = 0;
  for (int64_t s = 0; s < windows; ++s) count += scores[s] >= largest - kTie;
  int64_t before = (count - 1) / 2;
  for (int64_t s = 0; s < windows; ++s) {
    if (scores[s] >= largest - kTie && before-- == 0) return s;
  }
  return 0;
}

template <typename real>
void bounds_of_utterance(const real* gx, const real* gy, int64_t T, int64_t U, int64_t frames,
                         int64_t symbols, int64_t S, Topology topology, bool padded_search,
                         int32_t* start) {
  const int64_t step = largest_step(topology, S);
  const int64_t last = std::max<int64_t>(symbols + 1 - S, 0);
  const int64_t windows = std::max<int64_t>((padded_search ? U : symbols) + 1 - S, 0) + 1;
  WindowScores window_scores(U + 1, one_arc_a_frame(topology));
  std::vector<double> scores(windows);
  for (int64_t t = 0; t < T; ++t) {
    if (t >= frames - 1) {
      start[t] = static_cast<int32_t>(last);
      continue;
    }
    window_scores.compute(gx + t * (U + 1), gy + t * (U + 1), S, windows, scores.data());
    start[t] = static_cast<int32_t>(middle_of_largest(scores, windows));
  }
  // From right to left: monotone, then no step larger than `step`, then reachable from column 0.
  int64_t monotone = last, contiguous = last;
  for (int64_t t = T - 1; t >= 0; --t) {
    monotone = std::min<int64_t>(monotone, start[t]);
    contiguous = std::max(monotone, contiguous - step);
    start[t] = static_cast<int32_t>(std::min(step * t, contiguous));
  }
}

// best[s] = the largest of previous[s - step .. s], and which (the largest column of equals).
void sliding_maximum(const std::vector<double>& previous, int64_t windows, int64_t step,
                     std::vector<double>& best, int32_t* from) {
  std::deque<int64_t> candidates;
  for (int64_t s = 0; s < windows; ++s) {
    while (!candidates.empty() && previous[candidates.back()] <= previous[s]) candidates.pop_back();
    candidates.push_back(s);
    if (candidates.front() < s - step) candidates.pop_front();
    best[s] = previous[candidates.front()];
    from[s] = static_cast<int32_t>(candidates.front());
  }
}

template <typename real>
void exact_bounds_of_utterance(const real* gx, const real* gy, int64_t T, int64_t U, int64_t frames,
                               int64_t symbols, int64_t S, Topology topology, int32_t* from,
                               int32_t* start) {
  const int64_t step = largest_step(topology, S);
  const int64_t last = std::max<int64_t>(symbols + 1 - S, 0);
  const int64_t windows = last + 1;
  for (int64_t t = 0; t < T; ++t) start[t] = static_cast<int32_t>(std::min(step * t, last));
  if (step * (frames - 1) < last) return;  // no band reaches the last symbol
  WindowScores window_scores(U + 1, one_arc_a_frame(topology));
  std::vector<double> scores(windows), best(windows), reached(windows, minus_infinity<double>);
  window_scores.compute(gx, gy, S, windows, scores.data());
  reached[0] = scores[0];
  for (int64_t t = 1; t < frames; ++t) {
    window_scores.compute(gx + t * (U + 1), gy + t * (U + 1), S, windows, scores.data());
    sliding_maximum(reached, windows, step, best, from + t * (U + 1));
    for (int64_t s = 0; s < windows; ++s) reached[s] = best[s] + scores[s];
  }
  for (int64_t t = frames - 1; t > 0; --t) start[t - 1] = from[t * (U + 1) + start[t]];
}

// Calls work(gx, gy, n, frames, symbols) for every utterance, with its occupancies. Lengths that
// exceed the padding belong to an utterance without a path, whose band is not used: they are
// clamped, so that nothing outside is read.
template <typename Work>
void for_utterances(const char* op, const View& gx, const View& gy, const View& logit_lengths,
                    const View& target_lengths, const Work& work) {
  const int64_t N = gx.size(0), T = gx.size(1), U = gx.size(2) - 1;
  const int32_t* frames = data_of<int32_t>(logit_lengths);
  const int32_t* symbols = data_of<int32_t>(target_lengths);
  dispatch_accumulator(gx.scalar_type(), op, [&](auto zero) {
    using real = decltype(zero);
    parallel_tasks(N, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t offset = n * T * (U + 1);
        work(data_of<real>(gx) + offset, data_of<real>(gy) + offset, n,
             std::max<int64_t>(1, std::min<int64_t>(frames[n], T)),
             std::max<int64_t>(0, std::min<int64_t>(symbols[n], U)));
      }
    });
  });
}

void prune_bounds(const View& gx, const View& gy, const View& logit_lengths,
                  const View& target_lengths, int64_t s_range, int64_t rnnt_type,
                  bool padded_search, const View& start) {
  const int64_t T = gx.size(1), U = gx.size(2) - 1;
  for_utterances("prune_bounds", gx, gy, logit_lengths, target_lengths,
                 [&](auto emit, auto stay, int64_t n, int64_t frames, int64_t symbols) {
                   bounds_of_utterance(emit, stay, T, U, frames, symbols, s_range,
                                       static_cast<Topology>(rnnt_type), padded_search,
                                       mutable_data_of<int32_t>(start) + n * T);
                 });
}

void prune_bounds_exact(const View& gx, const View& gy, const View& logit_lengths,
                        const View& target_lengths, int64_t s_range, int64_t rnnt_type,
                        const View& scratch, const View& start) {
  const int64_t T = gx.size(1), U = gx.size(2) - 1;
  for_utterances("prune_bounds_exact", gx, gy, logit_lengths, target_lengths,
                 [&](auto emit, auto stay, int64_t n, int64_t frames, int64_t symbols) {
                   exact_bounds_of_utterance(emit, stay, T, U, frames, symbols, s_range,
                                             static_cast<Topology>(rnnt_type),
                                             mutable_data_of<int32_t>(scratch) + n * T * (U + 1),
                                             mutable_data_of<int32_t>(start) + n * T);
                 });
}

PRUNED_RNNT_CPU_OP(prune_bounds)
PRUNED_RNNT_CPU_OP(prune_bounds_exact)

}  // namespace
}  // namespace pruned_rnnt
