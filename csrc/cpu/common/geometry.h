// Memory layout of the nodes of a batch of lattices.
//
// Axes: N utterances, T frames, U symbols, S columns of a frame, R rows in all. A node is a row;
// rows go frame by frame, and inside a frame column by column. Column j of frame t is symbol
// position u = start[n,t] + j (start 0 for a full lattice). Utterance n takes
//   padded   T * S rows from row n * T * S on;
//   packed   T_n * W_n rows from row row_splits[n] on, W_n = S for a band and U_n + 1 without one.
// A node is valid where t < T_n and u <= U_n; an utterance whose lengths do not fit has none.
#pragma once

#include <algorithm>
#include <limits>

#include "stable.h"

namespace pruned_rnnt {

struct Geometry {
  // max_symbols: padded U, if another tensor of the op has that axis.
  Geometry(const Tensor& logit_lengths, const Tensor& target_lengths, const OptionalTensor& start,
           const OptionalTensor& row_splits, int64_t frames, int64_t columns,
           int64_t max_symbols = std::numeric_limits<int32_t>::max())
      : N(logit_lengths.size(0)),
        T(frames),
        S(columns),
        U(start.has_value() ? max_symbols : std::min(max_symbols, columns - 1)),
        logit_lengths(data_of<int32_t>(logit_lengths)),
        target_lengths(data_of<int32_t>(target_lengths)),
        start(data_or_null<int32_t>(start)),
        row_splits(data_or_null<int64_t>(row_splits)) {}

  bool packed() const { return row_splits != nullptr; }
  int64_t symbols_of(int64_t n) const { return target_lengths[n]; }
  // Frames that have rows: all T when padded.
  int64_t stored_frames_of(int64_t n) const { return packed() ? logit_lengths[n] : T; }
  // Frames that have nodes.
  int64_t frames_of(int64_t n) const {
    const bool fits = logit_lengths[n] <= T && target_lengths[n] >= 0 && target_lengths[n] <= U;
    return fits ? logit_lengths[n] : 0;
  }
  int64_t width_of(int64_t n) const { return packed() && !start ? symbols_of(n) + 1 : S; }
  int64_t first_row_of(int64_t n) const { return packed() ? row_splits[n] : n * T * S; }
  int64_t end_row_of(int64_t n) const {
    return first_row_of(n) + stored_frames_of(n) * width_of(n);
  }
  int64_t first_symbol_of(int64_t n, int64_t t) const { return start ? start[n * T + t] : 0; }

  int64_t N, T, S, U;
  const int32_t* logit_lengths;
  const int32_t* target_lengths;
  const int32_t* start;
  const int64_t* row_splits;
};

// Iterates over nodes; only the first row of a task needs divisions.
class NodeCursor {
 public:
  NodeCursor(const Geometry& geometry, int64_t row) : geometry_(geometry) {
    if (geometry.packed()) {
      const int64_t* splits = geometry.row_splits;
      n_ = std::upper_bound(splits, splits + geometry.N + 1, row) - splits - 1;
    } else {
      n_ = row / std::max<int64_t>(geometry.T * geometry.S, 1);
    }
    const int64_t inside = row - geometry.first_row_of(n_);
    enter_utterance();
    t_ = inside / width_;
    j_ = inside % width_;
    enter_frame();
  }

  int64_t n() const { return n_; }
  int64_t t() const { return t_; }
  int64_t u() const { return first_symbol_ + j_; }
  bool valid() const { return t_ < frames_ && u() >= 0 && u() <= symbols_; }
  // Whether the node has an emit: not all symbols have been emitted yet.
  bool emits() const { return valid() && u() < symbols_; }

  void advance() {
    if (++j_ < width_) return;
    j_ = 0;
    if (++t_ == geometry_.stored_frames_of(n_)) {
      t_ = 0;
      if (++n_ == geometry_.N) return;
      enter_utterance();
    }
    enter_frame();
  }

 private:
  void enter_utterance() {
    width_ = geometry_.width_of(n_);
    frames_ = geometry_.frames_of(n_);
    symbols_ = geometry_.symbols_of(n_);
  }
  void enter_frame() { first_symbol_ = geometry_.first_symbol_of(n_, t_); }

  const Geometry& geometry_;
  int64_t n_ = 0, t_ = 0, j_ = 0;
  int64_t width_ = 1, frames_ = 0, symbols_ = 0, first_symbol_ = 0;
};

}  // namespace pruned_rnnt
