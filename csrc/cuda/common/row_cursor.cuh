// Where the nodes of a batch of lattices lie in memory; the device's view of
// pruned_rnnt/ops/common/row_geometry.py.
//
// Axes: N utterances, T frames, U symbols, S columns of a frame (W_n of utterance n), R rows.
#pragma once

#include "cuda/common/launch.cuh"
#include "fast_divmod.h"

namespace pruned_rnnt {
namespace cuda {

struct RowGeometry {
  // most_symbols: the largest U_n that is legal beside the lattice's own limit.
  RowGeometry(const View& logit_lengths, const View& target_lengths, const OptionalView& start,
              const OptionalView& row_splits, int64_t T, int64_t S, int64_t most_symbols)
      : logit_lengths(data_of<int32_t>(logit_lengths)),
        target_lengths(data_of<int32_t>(target_lengths)),
        start(data_or_null<int32_t>(start)),
        row_splits(data_or_null<int64_t>(row_splits)),
        N(static_cast<int32_t>(logit_lengths.size(0))),
        T(static_cast<int32_t>(T)),
        S(static_cast<int32_t>(S)),
        most_symbols(static_cast<int32_t>(most_symbols)),
        // Of packed rows T may be no more than a bound, and the product is not used.
        utterance_rows(this->row_splits ? 1 : T * S),
        by_columns(static_cast<uint32_t>(S)),
        by_utterance(static_cast<uint32_t>(utterance_rows > 0 ? utterance_rows : 1)) {
    if (this->start == nullptr && most_symbols > S - 1) {
      this->most_symbols = static_cast<int32_t>(S - 1);
    }
  }

  // Frames that have nodes: none where the lengths do not fit.
  __device__ __forceinline__ int32_t frames_of(int32_t n) const {
    const int32_t frames = logit_lengths[n], symbols = target_lengths[n];
    return frames <= T && symbols >= 0 && symbols <= most_symbols ? frames : 0;
  }
  __device__ __forceinline__ int32_t width_of(int32_t n) const {
    if (row_splits == nullptr || start != nullptr) return S;
    const int32_t width = target_lengths[n] + 1;
    return width > 0 ? width : 1;
  }
  __device__ __forceinline__ int64_t first_row_of(int32_t n) const {
    return row_splits != nullptr ? row_splits[n] : n * utterance_rows;
  }
  __device__ __forceinline__ int32_t utterance_of(int64_t row) const {
    if (row_splits == nullptr) {
      return row <= 0xffffffffll ? by_utterance.divide(static_cast<uint32_t>(row))
                                 : static_cast<int32_t>(row / utterance_rows);
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

// A node, its frame's place in memory, and how the next frame lies to it.
struct BandNode {
  int32_t t, u, column, width;
  int32_t shift;  // start(t) - start(t+1)
  int32_t frames, symbols;

  __device__ __forceinline__ bool valid() const { return t < frames && u >= 0 && u <= symbols; }
};

// A node, and the way to later ones with a division only where an utterance begins.
class RowCursor {
 public:
  __device__ __forceinline__ RowCursor(const RowGeometry& geometry, int64_t row)
      : geometry_(geometry), row_(row) {
    enter_utterance(geometry.utterance_of(row));
  }

  __device__ __forceinline__ int32_t n() const { return n_; }
  __device__ __forceinline__ int32_t t() const { return t_; }
  __device__ __forceinline__ int32_t u() const { return first_symbol_ + column_; }
  __device__ __forceinline__ bool valid() const {
    return t_ < frames_ && u() <= symbols_ && u() >= 0;
  }
  // Whether a symbol can be emitted here: valid, and not all symbols are out yet.
  __device__ __forceinline__ bool emits() const { return valid() && u() < symbols_; }

  __device__ __forceinline__ BandNode node() const {
    int32_t shift = 0;
    if (geometry_.start != nullptr && t_ + 1 < frames_) {
      shift = first_symbol_ - geometry_.start[static_cast<int64_t>(n_) * geometry_.T + t_ + 1];
    }
    return {t_, u(), column_, width_, shift, frames_, symbols_};
  }

  // To a later row that exists.
  __device__ __forceinline__ void advance(int32_t rows) {
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
    enter_frame();
  }

 private:
  __device__ __forceinline__ void enter_utterance(int32_t n) {
    n_ = n;
    frames_ = geometry_.frames_of(n);
    symbols_ = geometry_.target_lengths[n];
    width_ = geometry_.width_of(n);
    const int64_t first = geometry_.first_row_of(n);
    end_row_ = geometry_.row_splits != nullptr ? geometry_.row_splits[n + 1]
                                               : first + geometry_.utterance_rows;
    const uint32_t within = static_cast<uint32_t>(row_ - first);
    t_ = width_ == geometry_.S ? geometry_.by_columns.divide(within) : within / width_;
    column_ = within - t_ * width_;
    enter_frame();
  }
  __device__ __forceinline__ void enter_frame() {
    first_symbol_ = geometry_.start != nullptr && t_ < geometry_.T
                        ? geometry_.start[static_cast<int64_t>(n_) * geometry_.T + t_]
                        : 0;
  }

  const RowGeometry& geometry_;
  int64_t row_, end_row_;
  int32_t n_, t_, column_, width_, frames_, symbols_, first_symbol_;
};

}  // namespace cuda
}  // namespace pruned_rnnt
