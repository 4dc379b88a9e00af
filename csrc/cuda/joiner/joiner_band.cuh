// Gradient of the joiner's rows for narrow bands that never move back, in one pass over the rows:
//
//   d am(t) = sum over u of g(t,u)      d lm(u) = sum over t of g(t,u)      g = grad d act / dx
//
// A block has an utterance and a slice of D. Its threads form teams of `lanes` threads; each team
// walks a segment of the chunk's frames with the sums of the band's columns in registers:
//
//   u  ^              [ s s s ]        s  sum stays in registers while u is in the band
//      |      [ 1 1 1 | 0 0            0  in the last window of team 0: left in shared memory
//      | [ 0 0 0 | 1 1                 1  in the first window of team 1: left there too
//      +--------team 0---|---team 1--> t
//
// A column that leaves the band is added to d lm directly, unless it is in the band at the first or
// last frame of the segment, because another team may then have some of its frames. These sums go
// to shared memory, and the first team of each column adds them up in order. So a launch adds to
// every element of d lm once, and the sum does not depend on which team finishes first.
//
// Axes: N batch, T frames, U symbols, S columns of the band, D joiner dim, r rows of the chunk.
#pragma once

#include "cuda/joiner/joiner_slice.cuh"

namespace pruned_rnnt::cuda {

constexpr int kTeamThreads = 256;
// The widest band of this kernel; the usual one is narrower and needs fewer registers.
constexpr int kUsualBand = 5, kWidestTeamBand = 8;

// Adds to an element that nothing else in the launch touches. The atomic does not wait for the old
// value.
template <typename real>
RNNT_DEVICE void add_alone(real* target, real sum) {
  atomicAdd(target, sum);
}

// Whether start decreases somewhere; all threads of the block call this and get the result.
__device__ inline bool start_decreases(const int32_t* start, int32_t frames) {
  int found = 0;
  for (int32_t t = threadIdx.x + 1; t < frames; t += blockDim.x) found |= start[t] < start[t - 1];
  return __syncthreads_or(found) != 0;
}

// First columns of the band at a segment's first frame and at its last.
struct Windows {
  int32_t first, last;

  // Index of column u among the two windows' columns, -1 if it is in neither.
  RNNT_DEVICE int32_t place(int32_t u, int32_t S) const {
    if (u >= first && u < first + S) return u - first;
    return u >= last && u < last + S ? S + u - last : -1;
  }
  RNNT_DEVICE int32_t column(int32_t place, int32_t S) const {
    return place < S ? first + place : last + place - S;
  }
};

// Sums of the columns in the windows of a block's teams, elements of D contiguous.
template <typename real>
class SharedColumns {
 public:
  // size: elements of D in a slice.
  RNNT_DEVICE SharedColumns(int32_t S, int size)
      : sums_(dynamic_shared_memory<real>()), S_(S), size_(size) {}

  static size_t bytes(int64_t S, int size, int teams) {
    return teams * (2 * S * size * sizeof(real) + sizeof(Windows));
  }

  RNNT_DEVICE real* sum(int team, int32_t place) const {
    return sums_ + (team * 2 * S_ + place) * size_;
  }
  RNNT_DEVICE Windows& windows(int team, int teams) const {
    return reinterpret_cast<Windows*>(sum(teams, 0))[team];
  }

 private:
  real* const sums_;
  const int32_t S_;
  const int size_;
};

// A team's segment, frames begin .. end - 1. grad_lm is that of the thread's elements.
template <int most, typename scalar, Activation activation, int width>
RNNT_DEVICE void walk_segment(const BandSlice<scalar, activation, width>& slice, int32_t begin,
                              int32_t end, const Windows& windows, acc_type<scalar>* shared_sums,
                              int size, const FrameGradients<scalar>& grad_am, int64_t am_at,
                              acc_type<scalar>* grad_lm) {
  using real = acc_type<scalar>;
  real sums[most][width] = {};
  int32_t first = windows.first;
  // Moves the band by one column.
  const auto shift = [&] {
    const int32_t u = first++, place = windows.place(u, slice.S);
    if (place >= 0) {
#pragma unroll
      for (int k = 0; k < width; ++k) shared_sums[place * size + k] = sums[0][k];
    } else if (slice.has(u)) {
#pragma unroll
      for (int k = 0; k < width; ++k) add_alone(grad_lm + int64_t{u} * slice.D + k, sums[0][k]);
    }
#pragma unroll
    for (int j = 0; j < most; ++j) {
#pragma unroll
      for (int k = 0; k < width; ++k) sums[j][k] = j + 1 < most ? sums[j + 1][k] : real(0);
    }
  };
  int32_t next = first;
  for (int32_t t = begin; t < end; ++t) {
    const int32_t here = next;
    if (t + 1 < end) next = slice.start[t + 1];
    for (int32_t i = min(here - first, slice.S); i > 0; --i) shift();
    first = here;
    real frame_sum[width] = {};
    slice.template each_column<most>(t, here, [&](int j, const real(&gradient)[width]) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
        frame_sum[k] += gradient[k];
        sums[j][k] += gradient[k];
      }
    });
    grad_am.template store<width>(am_at + t * grad_am.pitch, frame_sum);
  }
  for (int32_t i = slice.S; i > 0; --i) shift();
}

// Adds up the columns that several teams hold, at the first team that holds a part. All threads of
// the block take elements of all columns. grad_lm is that of the slice's first element; the slice
// has `size` elements, of which `used` are elements of D.
template <typename real>
RNNT_DEVICE void merge_columns(const SharedColumns<real>& columns, int32_t S, int32_t symbols,
                               int64_t D, int size, int used, int teams, int all_teams,
                               real* grad_lm) {
  const int places = teams * 2 * S;
  for (int task = threadIdx.x; task < places * size; task += kTeamThreads) {
    const int place = task / size, e = task - place * size;
    const int team = place / (2 * S), at = place - team * 2 * S;
    const Windows own = columns.windows(team, all_teams);
    const int32_t u = own.column(at, S);
    // A column in both windows is stored in the first.
    if (e >= used || u < 0 || u > symbols || own.place(u, S) != at) continue;
    if (team > 0 && columns.windows(team - 1, all_teams).place(u, S) >= 0) continue;
    real total = columns.sum(team, at)[e];
    for (int other = team + 1; other < teams; ++other) {
      const int32_t there = columns.windows(other, all_teams).place(u, S);
      if (there < 0) break;
      total += columns.sum(other, there)[e];
    }
    add_alone(grad_lm + u * D + e, total);
  }
}

// The same sums for a band that moves back somewhere: searches the frames of each column.
template <typename scalar, Activation activation, int width>
__device__ __noinline__ void sum_any_band(BandSlice<scalar, activation, width> slice,
                                          ChunkFrames chunk, int team, int teams,
                                          FrameGradients<scalar> grad_am, int64_t am_at,
                                          acc_type<scalar>* grad_lm) {
  using real = acc_type<scalar>;
  for (int32_t t = chunk.begin + team; t < chunk.valid_end; t += teams) {
    real frame_sum[width] = {};
    for (int32_t j = 0; j < slice.S; ++j) {
      if (slice.has(slice.start[t] + j)) slice.add_node(t, j, frame_sum);
    }
    grad_am.template store<width>(am_at + t * grad_am.pitch, frame_sum);
  }
  for (int32_t u = team; u <= slice.symbols; u += teams) {
    real sum[width] = {};
    for (int32_t t = chunk.begin; t < chunk.valid_end; ++t) {
      const int32_t j = u - slice.start[t];
      if (j >= 0 && j < slice.S) slice.add_node(t, j, sum);
    }
#pragma unroll
    for (int k = 0; k < width; ++k) add_alone(grad_lm + int64_t{u} * slice.D + k, sum[k]);
  }
}

// `lanes` threads make a team; `slices` blocks an utterance.
template <typename scalar, Activation activation, int most, int width>
__global__ void __launch_bounds__(kTeamThreads, most <= kUsualBand ? 2 : 1)
    joiner_band_backward_kernel(RowGeometry geometry, JoinerSizes sizes, int lanes, int32_t slices,
                                const scalar* __restrict__ grad, const scalar* __restrict__ hidden,
                                FrameGradients<scalar> grad_am,
                                acc_type<scalar>* __restrict__ grad_lm) {
  const int32_t n = blockIdx.x / slices, D = sizes.D, S = geometry.S;
  const ChunkFrames chunk(geometry, sizes, n);
  if (chunk.begin >= chunk.end) return;
  const int all_teams = kTeamThreads / lanes, team = threadIdx.x / lanes, size = lanes * width;
  const int32_t slice_d = (blockIdx.x - n * slices) * size;
  const int in_slice = threadIdx.x % lanes * width;
  const int32_t d = slice_d + in_slice;
  const int32_t* start = geometry.start + int64_t{n} * geometry.T;
  const int64_t am_at = int64_t{n} * sizes.frames * grad_am.pitch + d;
  grad_lm += int64_t{n} * sizes.columns * D + slice_d;
  const BandSlice<scalar, activation, width> slice{
      grad,  hidden,
      start, (geometry.first_row_of(n) - sizes.row_begin) * D + d,
      S,     geometry.target_lengths[n],
      D};

  const int32_t count = chunk.valid_end - chunk.begin;
  const bool decreases = start_decreases(start + chunk.begin, count);
  if (d < D) {
    const acc_type<scalar> zeros[width] = {};
    for (int32_t t = chunk.valid_end + team; t < chunk.end; t += all_teams) {
      grad_am.template store<width>(am_at + t * grad_am.pitch, zeros);
    }
  }
  if (count == 0) return;
  if (decreases) {
    if (d < D) sum_any_band(slice, chunk, team, all_teams, grad_am, am_at, grad_lm + in_slice);
    return;
  }
  const SharedColumns<acc_type<scalar>> columns(S, size);
  const int32_t segment = (count + all_teams - 1) / all_teams;
  const int teams = (count + segment - 1) / segment;
  if (team < teams && d < D) {
    const int32_t begin = chunk.begin + team * segment;
    const int32_t end = min(begin + segment, chunk.valid_end);
    const Windows windows{start[begin], start[end - 1]};
    if (in_slice == 0) columns.windows(team, all_teams) = windows;
    walk_segment<most>(slice, begin, end, windows, columns.sum(team, 0) + in_slice, size, grad_am,
                       am_at, grad_lm + in_slice);
  }
  __syncthreads();
  merge_columns(columns, S, slice.symbols, D, size, min(size, D - slice_d), teams, all_teams,
                grad_lm);
}

}  // namespace pruned_rnnt::cuda
