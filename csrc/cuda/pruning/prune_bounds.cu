// prune_bounds: the band of every frame by k2's rule, in two launches. A warp for each frame
// searches its best window; then a block for each utterance turns the windows into a band by scans:
//
//   first(t) = the middle one of the windows s with score(t,s) >= max score(t) - kTie
//   start(t) = min(step t, max over t' >= t of (min over t'' >= t' of first(t'')) - step (t' - t))
//
// Steps and notation: pruned_rnnt/ops/pruning/prune_bounds.py.
//
// Axes: N utterances, T frames, U symbols, S columns of the band; s is a first column.
#include "contracts/pruning.h"
#include "cuda/common/ops.cuh"
#include "cuda/pruning/window_scores.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kSearchThreads = 256;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
// Wider windows use prefix sums.
constexpr int32_t kDirectWindow = 16;

struct Sizes {
  int32_t T, width, S, step;
  bool padded_search, one_arc_a_frame;
};

// The middle one (of two the first) of the s in 0..windows-1 whose score is within kTie of the
// largest; by one warp, with the same result in all lanes. The scores of the first windows stay in
// registers; others are computed three times.
template <typename real, typename Score>
__device__ int32_t middle_of_largest(int32_t windows, Score&& score) {
  constexpr int kept_turns = 4;
  const int lane = threadIdx.x % 32;
  const real none = minus_infinity<real>();
  real kept[kept_turns];
  real largest = none;
#pragma unroll
  for (int turn = 0; turn < kept_turns; ++turn) {
    const int32_t s = 32 * turn + lane;
    kept[turn] = s < windows ? score(s) : none;
    largest = fmax(largest, kept[turn]);
  }
  for (int32_t s = 32 * kept_turns + lane; s < windows; s += 32) largest = fmax(largest, score(s));
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmax(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  const real least = largest - static_cast<real>(kTie);
  // Calls work(first window of a turn, lanes whose windows are among the largest) until it returns
  // true.
  const auto for_turns = [&](auto&& work) {
#pragma unroll
    for (int turn = 0; turn < kept_turns; ++turn) {
      if (work(32 * turn, __ballot_sync(kAllLanes, kept[turn] >= least))) return;
    }
    for (int32_t begin = 32 * kept_turns; begin < windows; begin += 32) {
      const int32_t s = begin + lane;
      if (work(begin, __ballot_sync(kAllLanes, s < windows && score(s) >= least))) return;
    }
  };
  int32_t count = 0;
  for_turns([&](int32_t, unsigned lanes) {
    count += __popc(lanes);
    return false;
  });
  int32_t before = (count - 1) / 2, middle = 0;
  for_turns([&](int32_t begin, unsigned lanes) {
    const int32_t here = __popc(lanes);
    if (before >= here) {
      before -= here;
      return false;
    }
    for (; before > 0; --before) lanes &= lanes - 1;
    middle = begin + __ffs(lanes) - 1;
    return true;
  });
  return middle;
}

// sums[u] = mass(0) + .. + mass(u-1) for u = 0..width, by one warp.
template <typename real>
__device__ void prefix_sums(const FrameOccupancy<real>& frame, double* sums) {
  const int lane = threadIdx.x % 32;
  const int32_t width = frame.width;
  double before = 0;
  for (int32_t begin = 0; begin < width; begin += 32) {
    double sum = begin + lane < width ? static_cast<double>(frame.mass(begin + lane)) : 0.0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const double other = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += other;
    }
    sum += before;
    if (begin + lane < width) sums[begin + lane + 1] = sum;
    before = __shfl_sync(kAllLanes, sum, 31);
  }
  if (lane == 0) sums[0] = 0;
  __syncwarp();
}

// Inclusive scan of `value` over the threads of the block from the last one down, by `combine`.
// `shared` has room for kWarps numbers.
template <typename Combine>
__device__ int32_t scan_from_right(int32_t value, int32_t* shared, Combine&& combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_down_sync(kAllLanes, value, distance);
    if (lane + distance < 32) value = combine(value, other);
  }
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  for (int later = warp + 1; later < blockDim.x / 32; ++later)
    value = combine(value, shared[later]);
  __syncthreads();
  return value;
}

// The window of the largest score for each frame, a warp each; `blocks` an utterance. The dynamic
// shared memory has, with a window wider than kDirectWindow, room for width + 1 numbers a warp.
template <typename real>
__global__ void __launch_bounds__(kSearchThreads)
    search_windows_kernel(Sizes sizes, int32_t blocks, const int32_t* logit_lengths,
                          const int32_t* target_lengths, const real* gx, const real* gy,
                          int32_t* starts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t n = blockIdx.x / blocks;
  const int32_t t = int32_t(blockIdx.x - n * blocks) * (blockDim.x / 32) + warp;
  const int32_t T = sizes.T, S = sizes.S;
  if (t >= T) return;
  const int32_t symbols = max(0, min(target_lengths[n], sizes.width - 1));
  int32_t s0;
  if (t >= logit_lengths[n] - 1) {
    s0 = max(symbols + 1 - S, 0);
  } else {
    const int32_t searched = sizes.padded_search ? sizes.width - 1 : symbols;
    const int32_t windows = max(searched + 1 - S, 0) + 1;
    const int64_t offset = (n * T + t) * sizes.width;
    const FrameOccupancy<real> frame{gx + offset, gy + offset, sizes.width, S,
                                     sizes.one_arc_a_frame};
    if (S <= kDirectWindow) {
      s0 = middle_of_largest<real>(windows, [&](int32_t s) { return frame.score(s); });
    } else {
      double* sums = dynamic_shared_memory<double>() + warp * (sizes.width + 1);
      prefix_sums(frame, sums);
      s0 = middle_of_largest<double>(windows, [&](int32_t s) {
        const double kept = sums[min(s + S, sizes.width)] - sums[s];
        return kept - static_cast<double>(frame.entering(s));
      });
    }
  }
  if (lane == 0) starts[n * T + t] = s0;
}

// Turns the windows of all frames into a band, a block for each utterance.
__global__ void __launch_bounds__(kThreads)
    adjust_windows_kernel(Sizes sizes, const int32_t* target_lengths, int32_t* starts) {
  const int64_t n = blockIdx.x;
  const int32_t T = sizes.T, step = sizes.step;
  const int32_t symbols = max(0, min(target_lengths[n], sizes.width - 1));
  const int32_t last = max(symbols + 1 - sizes.S, 0);
  int32_t* start = starts + n * T;

  // From right to left, kThreads frames at a time: monotone, then no step larger than `step`, then
  // reachable from column 0.
  __shared__ int32_t shared[kWarps];
  __shared__ int32_t carried_monotone, carried_reach;
  if (threadIdx.x == 0) {
    carried_monotone = last;
    carried_reach = std::numeric_limits<int32_t>::min();
  }
  __syncthreads();
  const auto smaller = [](int32_t a, int32_t b) { return min(a, b); };
  const auto larger = [](int32_t a, int32_t b) { return max(a, b); };
  const int32_t pieces = (T + blockDim.x - 1) / blockDim.x;
  for (int32_t piece = pieces - 1; piece >= 0; --piece) {
    const int32_t t = piece * blockDim.x + threadIdx.x;
    const bool inside = t < T;
    const int32_t later_monotone = carried_monotone, later_reach = carried_reach;
    const int32_t monotone =
        min(scan_from_right(inside ? start[t] : last, shared, smaller), later_monotone);
    // first(t') - step (t' - t) is largest where first(t') - step t' is; the latter can overflow 32
    // bits only for frames that do not matter.
    const int32_t reach = max(
        scan_from_right(inside ? monotone - step * t : later_reach, shared, larger), later_reach);
    if (inside) start[t] = min(step * t, reach + step * t);
    if (threadIdx.x == 0) {
      carried_monotone = monotone;
      carried_reach = reach;
    }
    __syncthreads();
  }
}

}  // namespace

void prune_bounds(const Launcher& launch, const View& gx, const View& gy, const View& logit_lengths,
                  const View& target_lengths, int64_t s_range, int64_t rnnt_type,
                  bool padded_search, const View& start) {
  const int64_t N = gx.size(0), T = gx.size(1), width = gx.size(2);
  if (N == 0 || T == 0) return;
  const Topology topology = static_cast<Topology>(rnnt_type);
  const Sizes sizes{int32_t(T),       int32_t(width),
                    int32_t(s_range), int32_t(largest_step(topology, s_range)),
                    padded_search,    one_arc_a_frame(topology)};
  dispatch_accumulator(gx.scalar_type(), "prune_bounds", [&](auto zero) {
    using real = decltype(zero);
    int64_t warps = kSearchThreads / 32;
    size_t shared = 0;
    if (s_range > kDirectWindow) {
      const size_t warp_bytes = (width + 1) * sizeof(double);
      warps = std::min<int64_t>(warps, launch.shared_bytes() / warp_bytes);
      STD_TORCH_CHECK(warps > 0, "prune_bounds: ", width, " columns are too many for this device");
      shared = warps * warp_bytes;
    }
    const int64_t blocks = (T + warps - 1) / warps;
    launch(search_windows_kernel<real>, uint32_t(N * blocks), uint32_t(32 * warps), shared, sizes,
           int32_t(blocks), data_of<int32_t>(logit_lengths), data_of<int32_t>(target_lengths),
           data_of<real>(gx), data_of<real>(gy), mutable_data_of<int32_t>(start));
    launch(adjust_windows_kernel, uint32_t(N), kThreads, 0, sizes, data_of<int32_t>(target_lengths),
           mutable_data_of<int32_t>(start));
  });
}

PRUNED_RNNT_CUDA_OP(prune_bounds)

}  // namespace pruned_rnnt::cuda
