// What the gradient of the joiner's rows reads and writes: the frames of a chunk, a thread's
// elements of an utterance's rows, and d am.
//
// Axes: N batch, T frames, U symbols, S columns of the band, D joiner dim, r rows of the chunk.
#pragma once

#include "cuda/common/row_cursor.cuh"
#include "cuda/common/vector_access.cuh"
#include "cuda/joiner/joiner_activation.cuh"

namespace pruned_rnnt {
namespace cuda {

// d am, of the accumulator's type or that of the rows, whose frames are `pitch` elements apart.
template <typename scalar>
struct FrameGradients {
  void* data;
  int64_t pitch;
  bool accumulated;

  template <int width>
  __device__ __forceinline__ void store(int64_t at, const acc_type<scalar> (&sum)[width]) const {
    using real = acc_type<scalar>;
    if (!accumulated) {
      Vector<scalar, width> rounded;
#pragma unroll
      for (int k = 0; k < width; ++k) rounded.x[k] = static_cast<scalar>(sum[k]);
      store_vector<width>(static_cast<scalar*>(data) + at, rounded);
      return;
    }
    // As many elements as make 16 bytes of the accumulator.
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

// The frames of utterance n that the chunk has: begin .. valid_end - 1 with nodes, and from there
// to end - 1 without.
struct ChunkFrames {
  __device__ __forceinline__ ChunkFrames(const RowGeometry& geometry, const JoinerSizes& sizes,
                                         int32_t n) {
    const int64_t W = geometry.width_of(n), first = geometry.first_row_of(n);
    const int64_t rows =
        geometry.row_splits != nullptr ? geometry.row_splits[n + 1] - first : geometry.T * W;
    const int64_t stored = min(rows / W, static_cast<int64_t>(sizes.frames));
    const auto frame_at = [&](int64_t row) {
      return static_cast<int32_t>(max(int64_t(0), min((row - first + W - 1) / W, stored)));
    };
    begin = frame_at(sizes.row_begin);
    end = frame_at(sizes.row_begin + sizes.rows);
    valid_end = max(begin, min(end, geometry.frames_of(n)));
  }
  int32_t begin, valid_end, end;
};

// What a thread reads and writes: an utterance's rows, from element `offset` on.
template <typename scalar, Activation activation, int width>
struct BandSlice {
  using real = acc_type<scalar>;

  const scalar *grad, *hidden;
  const int32_t* start;  // of every frame
  int64_t offset;        // of (t = 0, column 0) and the thread's elements of D
  int32_t S, symbols, D;

  __device__ __forceinline__ bool has(int32_t u) const { return u >= 0 && u <= symbols; }

  // Calls add(j, gradient) for the columns of frame t, all reads on their way before the first.
  template <int most, typename Add>
  __device__ __forceinline__ void each_column(int32_t t, int32_t first, Add&& add) const {
    Vector<scalar, width> g[most], h[most];
    int64_t at = offset + static_cast<int64_t>(t) * S * D;
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
  __device__ __forceinline__ void add_node(int32_t t, int32_t j, real (&sum)[width]) const {
    const int64_t at = offset + (static_cast<int64_t>(t) * S + j) * D;
    real gradient[width];
    through(load_vector<width>(grad + at), load_vector<width>(hidden + at), gradient);
#pragma unroll
    for (int k = 0; k < width; ++k) sum[k] += gradient[k];
  }

  __device__ __forceinline__ static void through(const Vector<scalar, width>& g,
                                                 const Vector<scalar, width>& h,
                                                 real (&gradient)[width]) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      gradient[k] =
          through_activation<activation>(static_cast<real>(g.x[k]), static_cast<real>(h.x[k]));
    }
  }
};

}  // namespace cuda
}  // namespace pruned_rnnt
