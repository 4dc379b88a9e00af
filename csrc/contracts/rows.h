// Groups of arguments that several ops take, and the contracts of the ops over rows of nodes.
// Layout of rows: row_geometry.h.
//
// Axes: N utterances, T frames, U symbols, S columns of a frame, R rows of all utterances, r rows
// of a call, D joiner dimension, V vocabulary, K durations.
#pragma once

#include "arguments.h"
#include "workspaces.h"

namespace pruned_rnnt::contracts {

constexpr int64_t kMostTopology = 3, kMostActivation = 2, kMostLogitMode = 2;

// logit_lengths, target_lengths, start, row_splits, frames and columns.
class LatticeRows {
 public:
  LatticeRows(Arguments& in, Size& N) : N(N) {
    const View& frames = in.tensor("logit_lengths", Type::kInt32, {N});
    const View& symbols = in.tensor("target_lengths", Type::kInt32, {N});
    const View* start = in.optional("start", Type::kInt32, {N, T});
    row_splits_ = in.optional("row_splits", Type::kInt64, {N + 1});
    in.size("frames", T);
    in.size("columns", S);
    if (row_splits_ == nullptr || !in.on_cpu()) return;
    // The device's own numbers are not read here: that would wait for it.
    const int64_t* const splits = data_of<int64_t>(*row_splits_);
    bool fits = true;
    for (int64_t n = 0; n < N.value(); ++n) {
      const int64_t length = data_of<int32_t>(frames)[n],
                    columns = data_of<int32_t>(symbols)[n] + 1;
      const int64_t width = start != nullptr ? S.value() : std::max<int64_t>(columns, 1);
      const int64_t end = splits[n] + std::max<int64_t>(length, 0) * width;
      fits &= splits[n] >= 0 && end <= splits[n + 1];
      // Utterances without frames may begin behind the last row.
      if (length > 0) packed_end_ = std::max(packed_end_, end);
    }
    in.require(fits, "`row_splits` must have room for the frames of `logit_lengths`");
  }

  // Arrays of R elements for all rows.
  void require_all(Arguments& in, const Size& R) const {
    if (row_splits_ != nullptr) {
      in.require(packed_end_ <= R.value(), "there must be an element for each row of `row_splits`");
    } else {
      in.require(R.value() == padded(), "there must be N frames columns rows");
    }
  }
  // r rows from `begin` on, of arrays of R elements.
  void require_part(Arguments& in, int64_t begin, const Size& r, const Size& R) const {
    require_inside(in, begin, r);
    in.require(begin + r.value() <= R.value(), "there must be an element for each of the rows");
  }
  // r rows from `begin` on. Rows behind packed ones are no nodes.
  void require_inside(Arguments& in, int64_t begin, const Size& r) const {
    in.require(r.value() == 0 || N.value() > 0, "rows need utterances");
    in.require(begin + (row_splits_ == nullptr ? r.value() : 0) <= padded(),
               "the rows from `row_begin` on must be among the N frames columns rows");
  }

  int64_t padded() const { return N.value() * T.value() * S.value(); }
  // Frames of all utterances: packed ones, whose longest may be unknown, have a row each.
  int64_t most_frames(const Size& R) const {
    const int64_t frames = N.value() * T.value();
    return row_splits_ == nullptr ? frames : std::min(frames, R.value());
  }

  Size& N;
  Size T{"frames"}, S{"columns"};

 private:
  const View* row_splits_ = nullptr;
  int64_t packed_end_ = 0;
};

inline int64_t row_begin(Arguments& in) { return in.number("row_begin", 0, kMostInt64 / 2); }
inline void topology(Arguments& in) { in.number("rnnt_type", 0, kMostTopology); }
// blank and normalization.
inline void scoring(Arguments& in, const Size& V) {
  in.number("blank", 0, V.value() - 1);
  in.number("normalization", 0, kMostLogitMode);
}
// Of a joiner's inputs: CUDA kernels take rows that are evenly spaced.
inline Layout side_layout(const Arguments& in) {
  return in.on_cpu() ? Layout::kContiguous : Layout::kPitched;
}

inline void band_lattice(Arguments& in) {
  Size N{"N"}, R{"R", kMostInt64};
  in.flat("px", Type::kReal, R);
  in.flat("py", Type::kReal, R);
  const LatticeRows rows(in, N);
  topology(in);
  rows.require_all(in, R);
  const int64_t least = cut_elements(N.value(), rows.S.value(), rows.most_frames(R));
  in.flat("work", Type::kReal, at_least(least));
  in.tensor("total", Type::kReal, {N});
  in.flat("gx", Type::kReal, R);
  in.flat("gy", Type::kReal, R);
}

inline void tdt_lattice(Arguments& in) {
  Size N{"N"}, R{"R", kMostInt64}, R_K{"R K", kMostInt64};
  in.flat("px", Type::kReal, R);
  in.flat("py", Type::kReal, R);
  in.flat("duration_logits", Type::kReal, R_K);
  const LatticeRows rows(in, N);
  rows.require_all(in, R);
  const std::vector<int64_t>& durations = in.numbers("durations");
  const int64_t K = static_cast<int64_t>(durations.size());
  int64_t longest = 0;
  for (const int64_t duration : durations) {
    in.require(duration >= 0 && duration <= kMostInt32 - 2, "`durations` must be int32, from 0 on");
    longest = std::max(longest, duration);
  }
  in.require(K > 0, "`durations` must not be empty");
  in.require(R_K.value() == R.value() * K, "`duration_logits` must be of shape (R,K)");
  const int64_t symbols = in.number("symbols", 0, kMostInt32 - 2);
  in.flat("work", Type::kReal, at_least(tdt_elements(R.value(), N.value(), symbols, K, longest)));
  in.tensor("total", Type::kReal, {N});
  for (const char* name : {"gx", "gy", "stay"}) in.flat(name, Type::kReal, R);
  in.flat("gd", Type::kReal, R_K);
}

inline void duration_gradient(Arguments& in) {
  Size N{"N"}, R{"R", kMostInt64}, r{"r", kMostInt64}, K{"K"};
  in.tensor("grad_loss", Type::kReal, {N});
  in.tensor("duration_logits", Type::kReal, {R, K});
  in.tensor("gd", Type::kReal, {R, K});
  const LatticeRows rows(in, N);
  const int64_t begin = row_begin(in);
  in.tensor("grad", Type::kScalar, {r, K}, Layout::kRows);
  rows.require_part(in, begin, r, R);
}

inline void log_probs(Arguments& in) {
  Size N{"N"}, U{"U"}, V{"V"}, r{"r", kMostInt64}, R{"R", kMostInt64};
  in.tensor("logits", Type::kScalar, {r, V}, Layout::kRows);
  in.tensor("targets", Type::kInt32, {N, U});
  const LatticeRows rows(in, N);
  const int64_t begin = row_begin(in);
  scoring(in, V);
  for (const char* name : {"px", "py", "lse"}) in.flat(name, Type::kReal, R);
  rows.require_part(in, begin, r, R);
}

inline void log_probs_backward(Arguments& in) {
  Size N{"N"}, U{"U"}, V{"V"}, r{"r", kMostInt64}, R{"R", kMostInt64};
  in.tensor("grad_loss", Type::kReal, {N});
  in.tensor("logits", Type::kScalar, {r, V}, Layout::kRows);
  for (const char* name : {"lse", "gx", "gy"}) in.flat(name, Type::kReal, R);
  in.tensor("targets", Type::kInt32, {N, U});
  const LatticeRows rows(in, N);
  const int64_t begin = row_begin(in);
  scoring(in, V);
  in.tensor("grad_logits", Type::kScalar, {r, at_least(V)}, Layout::kRows);
  rows.require_part(in, begin, r, R);
}

inline void joiner_rows(Arguments& in) {
  Size N{"N"}, T{"T"}, L{"U + 1"}, D{"D"}, r{"r", kMostInt64};
  in.tensor("am", Type::kScalar, {N, T, D}, side_layout(in));
  in.tensor("lm", Type::kScalar, {N, L, D}, side_layout(in));
  const LatticeRows rows(in, N);
  in.require(rows.T.value() <= T.value(), "`am` must have all `frames`");
  const int64_t begin = row_begin(in);
  in.number("activation", 0, kMostActivation);
  in.tensor("hidden", Type::kScalar, {r, D});
  rows.require_inside(in, begin, r);
}

inline void joiner_rows_backward(Arguments& in) {
  Size N{"N"}, T{"T"}, L{"U + 1"}, D{"D"}, r{"r", kMostInt64};
  in.tensor("grad_hidden", Type::kScalar, {r, D});
  in.tensor("hidden", Type::kScalar, {r, D});
  const LatticeRows rows(in, N);
  const int64_t begin = row_begin(in);
  in.number("activation", 0, kMostActivation);
  in.tensor("grad_am", Type::kScalarOrReal, {N, T, D}, side_layout(in));
  in.tensor("grad_lm", Type::kReal, {N, L, D});
  in.require(rows.T.value() <= T.value(), "`grad_am` must have all `frames`");
  rows.require_inside(in, begin, r);
}

inline void column_sums(Arguments& in) {
  Size R{"R", kMostInt64}, C{"C", kMostInt64}, P{"P"};
  in.tensor("x", Type::kScalar, {R, C}, Layout::kRows);
  in.tensor("partial", Type::kReal, {P, C});
  in.tensor("sums", Type::kReal, {C});
  in.require(P.value() > 0, "`partial` must have a row");
}

}  // namespace pruned_rnnt::contracts
