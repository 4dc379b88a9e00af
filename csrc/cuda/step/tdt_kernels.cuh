// Kernels of a TDT step between the recursions: log-probabilities of durations, the masses from
// which the band is chosen, and the gradient of the trivial joiner's durations.
//
// Axes: N batch, T frames, W = U+1 columns, K durations.
#pragma once

#include "cuda/common/arithmetic.cuh"

namespace pruned_rnnt::cuda {

constexpr int kTdtStepThreads = 256;
constexpr int kTdtStepWarps = kTdtStepThreads / 32;

// out[0..K) = log_softmax of logit(0) .. logit(K-1), -inf where all are -inf.
template <typename real, typename Logit>
RNNT_DEVICE void write_log_softmax(int32_t K, Logit&& logit, real* out) {
  real largest = minus_infinity<real>(), sum = 0;
  for (int32_t n = 0; n < K; ++n) largest = fmax(largest, logit(n));
  const real shift = largest == minus_infinity<real>() ? real(0) : largest;
  for (int32_t n = 0; n < K; ++n) sum += exp_of(logit(n) - shift);
  const real normaliser = sum == 0 ? real(0) : shift + log_of(sum);
  for (int32_t n = 0; n < K; ++n) out[n] = logit(n) - normaliser;
}

// Duration logits of one side (N,rows,K), whose rows are `pitch` elements apart.
template <typename scalar>
struct DurationSide {
  scalar* data;
  int64_t rows, pitch;

  RNNT_DEVICE scalar* row(int64_t n, int64_t i) const { return data + (n * rows + i) * pitch; }
};

// Log-probabilities (N,T,W,K) of am(t) + lm(u), a thread for each node; blockIdx.y is n.
template <typename scalar>
__global__ void __launch_bounds__(kTdtStepThreads)
    simple_durations_kernel(DurationSide<scalar> am, DurationSide<scalar> lm, int32_t K,
                            acc_type<scalar>* __restrict__ out) {
  using real = acc_type<scalar>;
  const int64_t n = blockIdx.y, nodes = am.rows * lm.rows;
  const int64_t node = int64_t(blockIdx.x) * kTdtStepThreads + threadIdx.x;
  if (node >= nodes) return;
  const int64_t t = node / lm.rows, u = node - t * lm.rows;
  const scalar *of_t = am.row(n, t), *of_u = lm.row(n, u);
  write_log_softmax<real>(
      K, [&](int32_t k) { return static_cast<real>(of_t[k]) + static_cast<real>(of_u[k]); },
      out + (n * nodes + node) * K);
}

// Log-probabilities (rows,K) of the logits in the columns from `logits` on.
template <typename scalar>
__global__ void __launch_bounds__(kTdtStepThreads)
    row_durations_kernel(const scalar* __restrict__ logits, int64_t rows, int64_t pitch, int32_t K,
                         acc_type<scalar>* __restrict__ out) {
  using real = acc_type<scalar>;
  const int64_t row = int64_t(blockIdx.x) * kTdtStepThreads + threadIdx.x;
  if (row >= rows) return;
  const scalar* const own = logits + row * pitch;
  write_log_softmax<real>(K, [&](int32_t k) { return static_cast<real>(own[k]); }, out + row * K);
}

// The two kernels of the band's masses follow pruned_rnnt/ops/pruning/prune_bounds.py, a warp for
// each of `frames` = N T frames.
constexpr float kLeastVisits = 0.02f;

template <typename real>
__global__ void __launch_bounds__(kTdtStepThreads)
    visits_kernel(int64_t frames, int32_t W, const real* __restrict__ gx,
                  const real* __restrict__ gy, const real* __restrict__ stay,
                  real* __restrict__ visits) {
  const int64_t frame = int64_t(blockIdx.x) * kTdtStepWarps + threadIdx.x / 32;
  if (frame >= frames) return;
  real sum = 0;
  for (int32_t u = threadIdx.x % 32; u < W; u += 32) {
    const int64_t node = frame * W + u;
    sum += gx[node] + gy[node] - stay[node];
  }
  sum = sum_lanes<32>(sum);
  if (threadIdx.x % 32 == 0) visits[frame] = sum;
}

template <typename real>
__global__ void __launch_bounds__(kTdtStepThreads)
    window_masses_kernel(int64_t frames, int32_t T, int32_t W, const real* __restrict__ gx,
                         const real* __restrict__ gy, const real* __restrict__ stay,
                         const real* __restrict__ visits, real* __restrict__ left,
                         real* __restrict__ stayed) {
  const int64_t frame = int64_t(blockIdx.x) * kTdtStepWarps + threadIdx.x / 32;
  if (frame >= frames) return;
  const int32_t lane = threadIdx.x % 32, t = int32_t(frame % T);
  const real least = static_cast<real>(kLeastVisits);
  // The last visited frame up to this one, else the first.
  int32_t source = 0;
  for (int32_t last = t; last > 0; last -= 32) {
    const int32_t at = last - lane;
    const bool visited = at > 0 && visits[frame - t + at] >= least;
    const unsigned lanes = __ballot_sync(kAllLanes, visited);
    if (lanes == 0) continue;
    source = last - (__ffs(lanes) - 1);
    break;
  }
  const int64_t from = frame - t + source;
  const real scale = real(1) / fmax(visits[from], least);
  for (int32_t u = lane; u < W; u += 32) {
    const int64_t node = from * W + u;
    const real stays = stay[node];
    left[frame * W + u] = (gx[node] + gy[node] - stays) * scale;
    stayed[frame * W + u] = stays * scale;
  }
}

// Adds unit(n) = mass softmax(n) - gd(n) of a node (ops/joiner/log_probs.py) to `sums`.
template <int most, typename real>
RNNT_DEVICE void add_unit_gradient(const real* log_probs, const real* gd, int32_t K,
                                   real (&sums)[most]) {
  real occupancy[most], mass = 0;
#pragma unroll
  for (int n = 0; n < most; ++n) {
    occupancy[n] = n < K ? gd[n] : real(0);
    mass += occupancy[n];
  }
  if (mass == 0) return;
#pragma unroll
  for (int n = 0; n < most; ++n) {
    if (n < K) sums[n] += mass * exp_of(log_probs[n]) - occupancy[n];
  }
}

// Columns of lm that a block takes, and the threads for each.
constexpr int kGradientColumns = 32;
constexpr int kGradientParts = kTdtStepThreads / kGradientColumns;

// The gradient of both sides: a warp sums over the columns of a frame, the threads of a column over
// its frames. blockIdx.x < am_blocks is for am, the others for lm; blockIdx.y is n. Columns K ..
// padded_K become 0.
template <int most, typename scalar>
__global__ void __launch_bounds__(kTdtStepThreads)
    simple_durations_backward_kernel(DurationSide<scalar> am, DurationSide<scalar> lm, int32_t K,
                                     int32_t padded_K, uint32_t am_blocks,
                                     const acc_type<scalar>* __restrict__ upstream,
                                     const acc_type<scalar>* __restrict__ log_probs,
                                     const acc_type<scalar>* __restrict__ gd) {
  using real = acc_type<scalar>;
  __shared__ real parts[kGradientParts][kGradientColumns][most];
  const int64_t n = blockIdx.y, T = am.rows, W = lm.rows;
  const real factor = upstream[n];
  real sums[most] = {};
  if (blockIdx.x < am_blocks) {
    const int64_t t = int64_t(blockIdx.x) * kTdtStepWarps + threadIdx.x / 32;
    if (t >= T) return;
    for (int64_t u = threadIdx.x % 32; u < W; u += 32) {
      const int64_t at = ((n * T + t) * W + u) * K;
      add_unit_gradient(log_probs + at, gd + at, K, sums);
    }
    scalar* const row = am.row(n, t);
#pragma unroll
    for (int k = 0; k < most; ++k) {
      const real sum = sum_lanes<32>(sums[k]);
      if (threadIdx.x % 32 == 0 && k < K) row[k] = static_cast<scalar>(sum * factor);
    }
    for (int32_t k = K + threadIdx.x % 32; k < padded_K; k += 32) row[k] = scalar(0.0f);
    return;
  }
  const int column = threadIdx.x % kGradientColumns, part = threadIdx.x / kGradientColumns;
  const int64_t u = int64_t(blockIdx.x - am_blocks) * kGradientColumns + column;
  for (int64_t t = part; t < T && u < W; t += kGradientParts) {
    const int64_t at = ((n * T + t) * W + u) * K;
    add_unit_gradient(log_probs + at, gd + at, K, sums);
  }
#pragma unroll
  for (int k = 0; k < most; ++k) parts[part][column][k] = sums[k];
  __syncthreads();
  for (int i = threadIdx.x; i < kGradientColumns * padded_K; i += kTdtStepThreads) {
    const int c = i / padded_K, k = i - c * padded_K;
    const int64_t to = int64_t(blockIdx.x - am_blocks) * kGradientColumns + c;
    if (to >= W) continue;
    real sum = 0;
    for (int p = 0; p < kGradientParts && k < K; ++p) sum += parts[p][c][k];
    lm.row(n, to)[k] = static_cast<scalar>(sum * factor);
  }
}

}  // namespace pruned_rnnt::cuda
