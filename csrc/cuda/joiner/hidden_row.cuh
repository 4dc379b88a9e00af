// A hidden row of the joiner, act(am(n,t) + lm(n,u)), by the lanes of a warp, and its gradient.
//
// Axes: N batch, T frames, U symbols, D joiner dim.
#pragma once

#include "cuda/common/vector_access.cuh"
#include "cuda/common/view.cuh"
#include "cuda/joiner/joiner_activation.cuh"

namespace pruned_rnnt::cuda {

// am or lm: `rows` rows of each utterance, `pitch` elements apart.
template <typename scalar>
struct PitchedInput {
  explicit PitchedInput(const View& view)
      : data(data_of<scalar>(view)), pitch(row_pitch(view)), rows(int32_t(view.size(1))) {}

  RNNT_DEVICE const scalar* row(int32_t n, int32_t i) const {
    return data + (int64_t(n) * rows + i) * pitch;
  }

  const scalar* __restrict__ data;
  int64_t pitch;
  int32_t rows;
};

template <Activation activation, int width, typename scalar>
RNNT_DEVICE void write_hidden_row(const scalar* a, const scalar* b, int32_t D, int lane,
                                  scalar* hidden) {
  using real = acc_type<scalar>;
#pragma unroll 2
  for (int32_t d = lane * width; d < D; d += 32 * width) {
    const Vector<scalar, width> x = load_vector<width>(a + d);
    const Vector<scalar, width> y = load_vector<width>(b + d);
    Vector<scalar, width> result;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const real sum = static_cast<real>(x.x[k]) + static_cast<real>(y.x[k]);
      result.x[k] = static_cast<scalar>(activated<activation, scalar>(sum));
    }
    store_vector<width>(hidden + d, result);
  }
}

// Adds the gradient that reaches the joiner's input through `row` of the chunk.
template <Activation activation, int width, typename scalar>
RNNT_DEVICE void add_row(const scalar* grad, const scalar* hidden, int64_t offset,
                         acc_type<scalar> (&sum)[width]) {
  using real = acc_type<scalar>;
  const Vector<scalar, width> g = load_vector<width>(grad + offset);
  const Vector<scalar, width> h = load_vector<width>(hidden + offset);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    sum[k] += through_activation<activation>(static_cast<real>(g.x[k]), static_cast<real>(h.x[k]));
  }
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
