// Memory layout of the nodes of a batch of lattices, stated in
// pruned_rnnt/ops/common/row_geometry.py, for the CPU and CUDA alike.
//
// Axes: N utterances, T frames, U symbols, S columns of a frame (W_n of utterance n), R rows.
#pragma once

#include <limits>

#include "args/rows.h"
#include "fast_divmod.h"

namespace pruned_rnnt {

struct RowGeometry {
  // most_symbols: the largest valid U_n; the lattice's columns limit it, too.
  explicit RowGeometry(const LatticeRows& lattice,
                       int64_t most_symbols = std::numeric_limits<int32_t>::max())
      : logit_lengths(data_of<int32_t>(lattice.logit_lengths)),
        target_lengths(data_of<int32_t>(lattice.target_lengths)),
        start(data_or_null<int32_t>(lattice.start)),
        row_splits(data_or_null<int64_t>(lattice.row_splits)),
        N(int32_t(lattice.logit_lengths.size(0))),
        T(int32_t(lattice.T)),
        S(int32_t(lattice.S)),
        most_symbols(int32_t(most_symbols)),
        // With packed rows T may be an upper bound, and the product is not used.
        utterance_rows(row_splits ? 1 : lattice.T * lattice.S),
        by_columns(uint32_t(lattice.S > 0 ? lattice.S : 1)),
        by_utterance(uint32_t(utterance_rows > 0 ? utterance_rows : 1)) {
    if (start == nullptr && most_symbols > lattice.S - 1) {
      this->most_symbols = int32_t(lattice.S - 1);
    }
  }

  // Frames that have nodes: none if the lengths exceed the padding.
  PRUNED_RNNT_HOST_DEVICE int32_t frames_of(int64_t n) const {
    const int32_t frames = logit_lengths[n], symbols = target_lengths[n];
    return frames <= T && symbols >= 0 && symbols <= most_symbols ? frames : 0;
  }
  // Frames that have rows: all T when padded.
  PRUNED_RNNT_HOST_DEVICE int32_t stored_frames_of(int64_t n) const {
    return row_splits != nullptr ? logit_lengths[n] : T;
  }
  PRUNED_RNNT_HOST_DEVICE int32_t width_of(int64_t n) const {
    if (row_splits == nullptr || start != nullptr) return S;
    const int32_t width = target_lengths[n] + 1;
    return width > 0 ? width : 1;
  }
  PRUNED_RNNT_HOST_DEVICE int64_t first_row_of(int64_t n) const {
    return row_splits != nullptr ? row_splits[n] : n * utterance_rows;
  }
  // Rows of the batch.
  PRUNED_RNNT_HOST_DEVICE int64_t rows() const { return first_row_of(N); }
  // Symbol position of a frame's first column.
  PRUNED_RNNT_HOST_DEVICE int32_t first_symbol_of(int64_t n, int64_t t) const {
    return start != nullptr && t < T ? start[n * T + t] : 0;
  }
  PRUNED_RNNT_HOST_DEVICE int32_t utterance_of(int64_t row) const {
    if (row_splits == nullptr) {
      return row <= 0xffffffffll ? by_utterance.divide(uint32_t(row))
                                 : int32_t(row / utterance_rows);
    }
    // The last n with row_splits[n] <= row.
    int32_t low = 0, high = N - 1;
    while (low < high) {
      const int32_t middle = (low + high + 1) / 2;
      if (row_splits[middle] <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  const int32_t *logit_lengths, *target_lengths, *start;
  const int64_t* row_splits;
  int32_t N, T, S, most_symbols;
  int64_t utterance_rows;
  FastDivmod by_columns, by_utterance;
};

// Iterates over nodes; only the first one of an utterance needs a division.
class RowCursor {
 public:
  PRUNED_RNNT_HOST_DEVICE RowCursor(const RowGeometry& geometry, int64_t row)
      : geometry_(geometry), row_(row) {
    enter_utterance(geometry.utterance_of(row));
  }

  PRUNED_RNNT_HOST_DEVICE int32_t n() const { return n_; }
  PRUNED_RNNT_HOST_DEVICE int32_t t() const { return t_; }
  PRUNED_RNNT_HOST_DEVICE int32_t column() const { return column_; }
  PRUNED_RNNT_HOST_DEVICE int32_t u() const { return first_symbol_ + column_; }
  // Of this utterance.
  PRUNED_RNNT_HOST_DEVICE int32_t frames() const { return frames_; }
  PRUNED_RNNT_HOST_DEVICE int32_t symbols() const { return symbols_; }
  PRUNED_RNNT_HOST_DEVICE int32_t width() const { return width_; }
  PRUNED_RNNT_HOST_DEVICE bool valid() const { return t_ < frames_ && u() <= symbols_ && u() >= 0; }
  // Whether the node has an emit: not all symbols have been emitted yet.
  PRUNED_RNNT_HOST_DEVICE bool emits() const { return valid() && u() < symbols_; }

  // Moves to a later row, which must exist.
  PRUNED_RNNT_HOST_DEVICE void advance(int32_t rows) {
    row_ += rows;
    if (row_ >= end_row_) {
      enter_utterance(geometry_.utterance_of(row_));
      return;
    }
    column_ += rows;
    if (column_ < width_) return;
    do {
      column_ -= width_;
      ++t_;
    } while (column_ >= width_);
    first_symbol_ = geometry_.first_symbol_of(n_, t_);
  }

 private:
  PRUNED_RNNT_HOST_DEVICE void enter_utterance(int32_t n) {
    n_ = n;
    frames_ = geometry_.frames_of(n);
    symbols_ = geometry_.target_lengths[n];
    width_ = geometry_.width_of(n);
    const int64_t first = geometry_.first_row_of(n);
    end_row_ = geometry_.row_splits != nullptr ? geometry_.row_splits[n + 1]
                                               : first + geometry_.utterance_rows;
    const uint32_t within = uint32_t(row_ - first);
    t_ = width_ == geometry_.S ? geometry_.by_columns.divide(within) : within / width_;
    column_ = within - t_ * width_;
    first_symbol_ = geometry_.first_symbol_of(n, t_);
  }

  const RowGeometry& geometry_;
  int64_t row_, end_row_;
  int32_t n_, t_, column_, width_, frames_, symbols_, first_symbol_;
};

}  // namespace pruned_rnnt
