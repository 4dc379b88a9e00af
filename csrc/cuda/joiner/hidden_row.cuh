// Hidden rows of the joiner, act(am(n,t) + lm(n,u)), by the lanes of a warp, and their gradient.
//
// Axes: N batch, T frames, U symbols, D joiner dim.
#pragma once

#include "cuda/common/vector_access.cuh"
#include "cuda/joiner/joiner_activation.cuh"
#include "view.h"

namespace pruned_rnnt::cuda {

// am or lm: `rows` rows of each utterance, `pitch` elements apart.
template <typename scalar>
struct PitchedInput {
  explicit PitchedInput(const View& view)
      : data(data_of<scalar>(view)), pitch(row_pitch(view)), rows(int32_t(view.size(1))) {}

  // Of all utterances' rows.
  RNNT_DEVICE int32_t row(int32_t n, int32_t i) const { return n * rows + i; }

  const scalar* __restrict__ data;
  int64_t pitch;
  int32_t rows;
};

// `count` hidden rows, at most 32, by a warp. Lane i knows the frame and the position of row i, as
// rows of all utterances' am and lm; frame -1: a row of zeros. Neighbouring rows usually have the
// same frame, which is read once.
template <Activation activation, int width, typename scalar>
RNNT_DEVICE void write_hidden_rows(const PitchedInput<scalar>& am, const PitchedInput<scalar>& lm,
                                   int32_t frame, int32_t position, int count, int32_t D,
                                   scalar* hidden, int64_t pitch) {
  using real = acc_type<scalar>;
  constexpr int ahead = 4;
  for (int32_t segment = 0; segment < D; segment += 32 * width) {
    const int32_t d = segment + int32_t(threadIdx.x % 32) * width;
    // Lanes without elements load others: a condition would move the elements one by one.
    const int32_t from = min(d, D - width);
    real a[width] = {};
    int32_t frame_of_a = -1;
    for (int first = 0; first < count; first += ahead) {
      int32_t frames[ahead];
      Vector<scalar, width> b[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int lane = min(first + i, count - 1);
        frames[i] = __shfl_sync(kAllLanes, frame, lane);
        const int64_t row = max(0, __shfl_sync(kAllLanes, position, lane));
        b[i] = load_vector<width>(lm.data + row * lm.pitch + from);
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (first + i >= count || d >= D) break;
        if (frames[i] >= 0 && frames[i] != frame_of_a) {
          frame_of_a = frames[i];
          unpack(load_vector<width>(am.data + frame_of_a * am.pitch + d), a);
        }
        real value[width];
        unpack(b[i], value);
#pragma unroll
        for (int k = 0; k < width; ++k) {
          value[k] = frames[i] >= 0 ? activated<activation, scalar>(a[k] + value[k]) : real(0);
        }
        store_vector<width>(hidden + (first + i) * pitch + d, pack<scalar>(value));
      }
    }
  }
}

// Adds the gradient that reaches the joiner's input through `row` of the chunk.
template <Activation activation, int width, typename scalar>
RNNT_DEVICE void add_row(const scalar* grad, const scalar* hidden, int64_t offset,
                         acc_type<scalar> (&sum)[width]) {
  add_through<activation>(load_vector<width>(grad + offset), load_vector<width>(hidden + offset),
                          sum);
}

// Adds the sums of all warps of a block, for piece `piece` of 32 vectors of a row of D elements, to
// that row, in the order of the warps.
template <int warps, typename real, int width>
RNNT_DEVICE void add_warp_sums(const real (&sum)[width], int32_t piece, int32_t D, real* row) {
  __shared__ real sums[warps][32 * width];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < width; ++k) sums[warp][lane * width + k] = sum[k];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * width; i += warps * 32) {
    const int32_t at = piece * 32 * width + i;
    if (at >= D) return;
    real total = 0;
#pragma unroll
    for (int from = 0; from < warps; ++from) total += sums[from][i];
    row[at] += total;
  }
}

}  // namespace pruned_rnnt::cuda
