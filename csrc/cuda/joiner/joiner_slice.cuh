// Inputs and outputs of the gradient of the joiner's rows: the frames of a chunk, a thread's
// elements of an utterance's rows, and d am.
//
// Axes: N batch, T frames, U symbols, S columns of the band, D joiner dim, r rows of the chunk.
#pragma once

#include "cuda/common/vector_access.cuh"
#include "cuda/joiner/joiner_activation.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {

// d am in the accumulator's type or that of the rows; frames are `pitch` elements apart.
template <typename scalar>
struct FrameGradients {
  void* data;
  int64_t pitch;
  bool accumulated;

  template <int width>
  RNNT_DEVICE void load(int64_t at, acc_type<scalar> (&sum)[width]) const {
    using real = acc_type<scalar>;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      sum[k] = accumulated ? static_cast<const real*>(data)[at + k]
                           : static_cast<real>(static_cast<const scalar*>(data)[at + k]);
    }
  }

  template <int width>
  RNNT_DEVICE void store(int64_t at, const acc_type<scalar> (&sum)[width]) const {
    using real = acc_type<scalar>;
    if (!accumulated) {
      Vector<scalar, width> rounded;
#pragma unroll
      for (int k = 0; k < width; ++k) rounded.x[k] = static_cast<scalar>(sum[k]);
      store_vector<width>(static_cast<scalar*>(data) + at, rounded);
      return;
    }
    // Accumulators in parts of 16 bytes.
    constexpr int part = width * sizeof(real) > 16 ? 16 / sizeof(real) : width;
#pragma unroll
    for (int begin = 0; begin < width; begin += part) {
      Vector<real, part> values;
#pragma unroll
      for (int k = 0; k < part; ++k) values.x[k] = sum[begin + k];
      store_vector<part>(static_cast<real*>(data) + at + begin, values);
    }
  }
};

struct JoinerSizes {
  int64_t row_begin, rows;
  int32_t frames, columns;  // of am and lm
  int32_t D;
};

// The chunk's frames of utterance n: begin .. valid_end - 1 have nodes, valid_end .. end - 1 have
// none.
struct ChunkFrames {
  RNNT_DEVICE ChunkFrames(const RowGeometry& geometry, const JoinerSizes& sizes, int32_t n) {
    const int64_t W = geometry.width_of(n), first = geometry.first_row_of(n);
    const int64_t rows =
        geometry.row_splits != nullptr ? geometry.row_splits[n + 1] - first : geometry.T * W;
    const int64_t stored = min(rows / W, int64_t(sizes.frames));
    const auto frame_at = [&](int64_t row) {
      return int32_t(max(int64_t(0), min((row - first + W - 1) / W, stored)));
    };
    begin = frame_at(sizes.row_begin);
    end = frame_at(sizes.row_begin + sizes.rows);
    valid_end = max(begin, min(end, geometry.frames_of(n)));
  }
  int32_t begin, valid_end, end;
};

// A thread's elements of an utterance's rows, from element `offset` on.
template <typename scalar, Activation activation, int width>
struct BandSlice {
  using real = acc_type<scalar>;

  const scalar *grad, *hidden;
  const int32_t* start;  // of every frame
  int64_t offset;        // of (t = 0, column 0) and the thread's elements of D
  int32_t S, symbols, D;

  RNNT_DEVICE bool has(int32_t u) const { return u >= 0 && u <= symbols; }

  // Calls add(j, gradient) for the columns of frame t, after starting all reads.
  template <int most, typename Add>
  RNNT_DEVICE void each_column(int32_t t, int32_t first, Add&& add) const {
    Vector<scalar, width> g[most], h[most];
    int64_t at = offset + int64_t(t) * S * D;
#pragma unroll
    for (int j = 0; j < most; ++j) {
      g[j] = h[j] = Vector<scalar, width>{};
      if (j < S && has(first + j)) {
        g[j] = load_vector<width>(grad + at);
        h[j] = load_vector<width>(hidden + at);
      }
      at += D;
    }
#pragma unroll
    for (int j = 0; j < most; ++j) {
      real gradient[width];
      through(g[j], h[j], gradient);
      add(j, gradient);
    }
  }

  // Adds the gradient through column j of frame t.
  RNNT_DEVICE void add_node(int32_t t, int32_t j, real (&sum)[width]) const {
    const int64_t at = offset + (int64_t(t) * S + j) * D;
    add_through<activation>(load_vector<width>(grad + at), load_vector<width>(hidden + at), sum);
  }

  RNNT_DEVICE static void through(const Vector<scalar, width>& g, const Vector<scalar, width>& h,
                                  real (&gradient)[width]) {
    real g_here[width], h_here[width];
    unpack(g, g_here);
    unpack(h, h_here);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      gradient[k] = through_activation<activation>(g_here[k], h_here[k]);
    }
  }
};

}  // namespace pruned_rnnt::cuda
