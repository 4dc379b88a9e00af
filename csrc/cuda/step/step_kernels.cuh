// The small kernels between the ops of a pruned step: casts, scales and sums of a few numbers, as
// many as possible in one launch.
#pragma once

#include <array>

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/vector_access.cuh"

namespace pruned_rnnt::cuda {

constexpr int kSegmentThreads = 256;
// Elements a thread takes at a time.
template <typename scalar>
constexpr int kSegmentVector = sizeof(scalar) == 8 ? 2 : 4;
constexpr int kMostSegments = 18;

// target[0..count) = source[0..count) cast, then `fill` up to target_count. source is of type float
// where `wide`, else of the target's.
struct Segment {
  const void* source;
  void* target;
  int64_t count, target_count;
  float fill;
  bool wide;
};

using Segments = std::array<Segment, kMostSegments>;

template <typename from, typename to>
__device__ __forceinline__ void cast_segment(const Segment& segment) {
  constexpr int width = kSegmentVector<to>;
  const from* source = static_cast<const from*>(segment.source);
  to* target = static_cast<to*>(segment.target);
  const bool aligned = reinterpret_cast<uintptr_t>(source) % (width * sizeof(from)) == 0 &&
                       reinterpret_cast<uintptr_t>(target) % (width * sizeof(to)) == 0;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kSegmentThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kSegmentThreads + threadIdx.x;
  const int64_t whole = aligned ? segment.count / width * width : 0;
#pragma unroll 4
  for (int64_t i = thread * width; i < whole; i += threads * width) {
    const Vector<from, width> x = load_vector<width>(source + i);
    Vector<to, width> y;
#pragma unroll
    for (int k = 0; k < width; ++k) y.x[k] = static_cast<to>(x.x[k]);
    store_vector<width>(target + i, y);
  }
  for (int64_t i = whole + thread; i < segment.target_count; i += threads) {
    target[i] = i < segment.count ? static_cast<to>(source[i]) : static_cast<to>(segment.fill);
  }
}

// Lengths on the CPU, passed by value: a copy from host memory would take longer than a launch. As
// many as fit into the parameters of a kernel.
constexpr int kLengthsInLaunch = 384;

struct HostLengths {
  int32_t first, count;  // utterances
  int64_t first_row;
  std::array<int32_t, kLengthsInLaunch> frames, symbols;
};

// Null where rows are not packed.
struct LengthsOnDevice {
  int32_t *logit_lengths, *target_lengths;
  int64_t* row_splits;
};

// Where the gradients of the two losses of every utterance are written, and their values; null if
// there will be no backward pass.
template <typename real>
struct Upstream {
  real *simple, *pruned;
  real to_simple, to_pruned;
};

template <typename real>
struct StepPrologue {
  HostLengths lengths;
  int64_t S;
  LengthsOnDevice device;
  Upstream<real> upstream;
};

// Writes the lengths and the row splits (S rows a frame) if rows are packed, and the gradients; by
// one block.
template <typename real>
__device__ __forceinline__ void write_utterances(const StepPrologue<real>& prologue) {
  const auto& [lengths, S, device, upstream] = prologue;
  for (int32_t i = threadIdx.x; i <= lengths.count; i += blockDim.x) {
    const int32_t n = lengths.first + i;
    if (device.row_splits != nullptr) {
      int64_t frames = 0;
      for (int32_t k = 0; k < i; ++k) frames += lengths.frames[k];
      device.row_splits[n] = lengths.first_row + S * frames;
    }
    if (i == lengths.count) return;
    if (device.logit_lengths != nullptr) {
      device.logit_lengths[n] = lengths.frames[i];
      device.target_lengths[n] = lengths.symbols[i];
    }
    if (upstream.simple != nullptr) {
      upstream.simple[n] = upstream.to_simple;
      upstream.pruned[n] = upstream.to_pruned;
    }
  }
}

// For the utterances for which the first launch has no room.
template <typename real>
__global__ void more_utterances_kernel(const __grid_constant__ StepPrologue<real> prologue) {
  write_utterances(prologue);
}

// Memory to clear, in words of 16 bytes.
struct Cleared {
  uint4* data;
  int64_t words;
};

// The first launch of a step. blockIdx.y < count casts that segment, == count clears memory, and
// count + 1 writes what the first utterances need.
template <typename to>
__global__ void __launch_bounds__(kSegmentThreads)
    prologue_kernel(const __grid_constant__ Segments segments, int count, Cleared cleared,
                    const __grid_constant__ StepPrologue<acc_type<to>> prologue) {
  const int task = blockIdx.y;
  if (task > count) {
    if (blockIdx.x == 0) write_utterances(prologue);
    return;
  }
  if (task == count) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kSegmentThreads + threadIdx.x;
    for (int64_t i = first; i < cleared.words; i += gridDim.x * kSegmentThreads) {
      cleared.data[i] = uint4{};
    }
    return;
  }
  const Segment& segment = segments[task];
  if (segment.wide) {
    cast_segment<float, to>(segment);
  } else {
    cast_segment<to, to>(segment);
  }
}

// The first columns of rows that are `pitch` elements apart, by a block for some rows at a time.
template <typename scalar>
struct PitchedRows {
  scalar* data;
  int64_t rows, pitch;
  int32_t columns;
};

template <typename scalar>
using PitchedSides = std::array<PitchedRows<scalar>, 2>;

// gradient *= factor(n), for the two sides of the simple loss (blockIdx.y) and utterance n
// (blockIdx.z), of which `rows` is the number of rows.
template <typename scalar, int width>
__global__ void __launch_bounds__(kSegmentThreads)
    scale_rows_kernel(const __grid_constant__ PitchedSides<scalar> sides,
                      const acc_type<scalar>* __restrict__ factors) {
  using real = acc_type<scalar>;
  const PitchedRows<scalar>& side = sides[blockIdx.y];
  const real factor = factors[blockIdx.z];
  for (int64_t row = blockIdx.x; row < side.rows; row += gridDim.x) {
    scalar* const data = side.data + (blockIdx.z * side.rows + row) * side.pitch;
    for (int32_t i = threadIdx.x * width; i < side.columns; i += kSegmentThreads * width) {
      Vector<scalar, width> x = load_vector<width>(data + i);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        x.x[k] = static_cast<scalar>(static_cast<real>(x.x[k]) * factor);
      }
      store_vector<width>(data + i, x);
    }
  }
}

// target = source, rows behind each other, cast.
template <typename scalar>
__global__ void __launch_bounds__(kSegmentThreads)
    cast_rows_kernel(const acc_type<scalar>* __restrict__ source, PitchedRows<scalar> target) {
  for (int64_t row = blockIdx.x; row < target.rows; row += gridDim.x) {
    const acc_type<scalar>* const from = source + row * target.columns;
    scalar* const to = target.data + row * target.pitch;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < target.columns; i += kSegmentThreads) {
      to[i] = static_cast<scalar>(from[i]);
    }
  }
}

// Losses by the two log-probabilities (2,N): total = simple_scale simple + pruned_scale pruned.
// Not reduced: total (N), parts (2,N); else total (1), parts (2), and in utterance_losses (3,N) the
// three of each utterance. One block.
template <typename real>
__global__ void __launch_bounds__(kSegmentThreads)
    losses_kernel(const real* __restrict__ totals, int32_t N, real simple_scale, real pruned_scale,
                  bool reduced, real share, real* __restrict__ total, real* __restrict__ parts,
                  real* __restrict__ utterance_losses) {
  __shared__ real sums[3][kSegmentThreads];
  real own[3] = {};
  for (int32_t n = threadIdx.x; n < N; n += kSegmentThreads) {
    const real simple = -totals[n], pruned = -totals[N + n];
    const real both = simple_scale * simple + pruned_scale * pruned;
    if (reduced) {
      own[0] += both;
      own[1] += simple;
      own[2] += pruned;
      utterance_losses[n] = both;
      utterance_losses[N + n] = simple;
      utterance_losses[2 * N + n] = pruned;
    } else {
      total[n] = both;
      parts[n] = simple;
      parts[N + n] = pruned;
    }
  }
  if (!reduced) return;
  for (int i = 0; i < 3; ++i) sums[i][threadIdx.x] = own[i];
  __syncthreads();
  for (int distance = kSegmentThreads / 2; distance > 0; distance /= 2) {
    if (threadIdx.x < distance) {
      for (int i = 0; i < 3; ++i) sums[i][threadIdx.x] += sums[i][threadIdx.x + distance];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    total[0] = sums[0][0] * share;
    parts[0] = sums[1][0] * share;
    parts[1] = sums[2][0] * share;
  }
}

// The gradients of each utterance's simple and pruned loss (2,N), from those of the total and of
// the two losses; a null pointer is no gradient, a stride of 0 one for all utterances.
template <typename real>
__global__ void upstream_kernel(const real* __restrict__ total, const real* __restrict__ simple,
                                const real* __restrict__ pruned, int32_t stride, int32_t N,
                                real simple_scale, real pruned_scale, real share,
                                real* __restrict__ upstream) {
  for (int32_t n = threadIdx.x; n < N; n += blockDim.x) {
    const int32_t at = n * stride;
    real to_simple = 0, to_pruned = 0;
    if (total != nullptr) {
      to_simple = simple_scale * total[at];
      to_pruned = pruned_scale * total[at];
    }
    if (simple != nullptr) to_simple += simple[at];
    if (pruned != nullptr) to_pruned += pruned[at];
    upstream[n] = to_simple * share;
    upstream[N + n] = to_pruned * share;
  }
}

}  // namespace pruned_rnnt::cuda
