// prune_bounds_exact: the best band under the constraints of prune_bounds, by dynamic programming
// over frames with one block for each utterance:
//
//   best(t,s) = score(t,s) + max over s - step <= s' <= s of best(t-1,s')
//
// Contract: pruned_rnnt/ops/pruning/prune_bounds.py.
//
// Axes: N utterances, T frames, U symbols, S columns of the band; s is a first column.
#include "contracts/pruning.h"
#include "cuda/common/ops.cuh"
#include "cuda/pruning/window_scores.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 1024;

// Shared memory holds the best scores of two frames.
template <typename real>
__global__ void __launch_bounds__(kThreads)
    prune_bounds_exact_kernel(int32_t T, int32_t width, int32_t S, int32_t step, bool one_arc,
                              const int32_t* logit_lengths, const int32_t* target_lengths,
                              const real* gx, const real* gy, int32_t* scratch, int32_t* starts) {
  const int64_t n = blockIdx.x;
  const int32_t frames = min(logit_lengths[n], T);
  const int32_t last = max(min(target_lengths[n], width - 1) + 1 - S, 0);
  const int32_t windows = last + 1;
  int32_t* start = starts + n * T;
  int32_t* from = scratch + n * T * width;
  // Used if no band is feasible, and behind the last frame.
  for (int32_t t = threadIdx.x; t < T; t += blockDim.x) start[t] = min(step * t, last);
  __syncthreads();
  if (frames < 1 || step * (frames - 1) < last) return;

  double* reached = dynamic_shared_memory<double>();
  double* reached_before = reached + windows;
  for (int32_t t = 0; t < frames; ++t) {
    const int64_t offset = (n * T + t) * width;
    const FrameOccupancy<real> frame{gx + offset, gy + offset, width, S, one_arc};
    for (int32_t s = threadIdx.x; s < windows; s += blockDim.x) {
      double best = s == 0 ? 0.0 : minus_infinity<double>();
      int32_t best_from = s;
      if (t > 0) {
        // The largest column among equals.
        best = reached_before[s];
        for (int32_t before = s - 1; before >= max(s - step, 0); --before) {
          if (reached_before[before] > best) {
            best = reached_before[before];
            best_from = before;
          }
        }
      }
      from[int64_t(t) * width + s] = best_from;
      reached[s] = best + static_cast<double>(frame.score(s));
    }
    __syncthreads();
    double* const swapped = reached;
    reached = reached_before;
    reached_before = swapped;
  }
  if (threadIdx.x != 0) return;
  int32_t s = last;
  for (int32_t t = frames - 1; t >= 0; --t) {
    start[t] = s;
    s = from[int64_t(t) * width + s];
  }
}

}  // namespace

void prune_bounds_exact(const Launcher& launch, const View& gx, const View& gy,
                        const View& logit_lengths, const View& target_lengths, int64_t s_range,
                        int64_t rnnt_type, const View& scratch, const View& start) {
  const int64_t N = gx.size(0), T = gx.size(1), width = gx.size(2);
  if (N == 0 || T == 0) return;
  const int64_t windows = std::max<int64_t>(width - s_range, 0) + 1;
  const Topology topology = static_cast<Topology>(rnnt_type);
  const size_t shared = 2 * windows * sizeof(double);
  STD_TORCH_CHECK(shared <= static_cast<size_t>(launch.shared_bytes()),
                  "prune_bounds_exact: ", windows, " windows are too many for this device");
  const int64_t threads = std::min<int64_t>(kThreads, (windows + 31) / 32 * 32);
  dispatch_accumulator(gx.scalar_type(), "prune_bounds_exact", [&](auto zero) {
    using real = decltype(zero);
    launch(prune_bounds_exact_kernel<real>, uint32_t(N), uint32_t(threads), shared, int32_t(T),
           int32_t(width), int32_t(s_range), int32_t(largest_step(topology, s_range)),
           one_arc_a_frame(topology), data_of<int32_t>(logit_lengths),
           data_of<int32_t>(target_lengths), data_of<real>(gx), data_of<real>(gy),
           mutable_data_of<int32_t>(scratch), mutable_data_of<int32_t>(start));
  });
}

PRUNED_RNNT_CUDA_OP(prune_bounds_exact)

}  // namespace pruned_rnnt::cuda
