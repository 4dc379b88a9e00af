// What the searches compute on the device. Contract: pruned_rnnt/ops/search/search_frames.py.
//
// A block searches some utterances from their first frame to their last, because a frame computes
// so little that starting kernels would take most of the time. It reads the weights again in every
// step, from the L2 cache, so it computes a tile of rows at once:
//
//     y(r, o) = bias(o) + sum_i x(r, i) w(o, i)        r < 8 rows, in shared memory
//
//     w    o + 0   [ lane 0 | 1 | 2 | 3 | 0 | 1 | ... ]    a warp reads the weights of sixteen
//          o + 1   [ lane 4 | 5 | 6 | 7 | 4 | 5 | ... ]    outputs for all rows; a lane takes four
//          ...     [                                  ]    elements at once
//          o + 8   [ lane 0 | 1 | 2 | 3 | 0 | 1 | ... ]    lane 4 g + t gets rows 2 t and 2 t + 1
//          ...     [                                  ]    of the outputs o + g and o + 8 + g
//     x    r       [ lane 4 r | ...                   ]
//
// Tensor cores add up runs of sixteen elements, in float32's precision (tf32_product.cuh). The sum
// of a row does not depend on the other rows.
//
// Axes: C symbols of a context, P predictor width, D joiner width, V vocabulary.
#pragma once

#include <algorithm>

#include "args/search.h"
#include "cuda/common/device_op.cuh"
#include "cuda/common/tf32_product.cuh"
#include "cuda/common/vector_access.cuh"
#include "cuda/joiner/joiner_activation.cuh"
#include "host_device.h"

namespace pruned_rnnt::cuda {

constexpr int kSearchThreads = 512;
constexpr int kSearchWarps = kSearchThreads / 32;
// Rows, outputs and elements of a tile; rows and outputs of a lane.
constexpr int kTileRows = 8, kTileOutputs = 16, kTileInputs = 16;
constexpr int kLaneRows = 2, kLaneOutputs = 2, kLaneInputs = 4;
// The most static shared memory of a search.
constexpr size_t kStaticBytes = 4096;

// Elements from one row of a tile to the next: a warp reads two rows at once, from different banks.
PRUNED_RNNT_HOST_DEVICE int32_t tile_stride(int32_t inputs) {
  return (inputs + 31) / 32 * 32 + kTileInputs;
}

struct DeviceSearchModel {
  explicit DeviceSearchModel(const SearchModelArguments& x)
      : tables(data_of<float>(x.tables)),
        decoder_weight(data_of<float>(x.decoder_weight)),
        decoder_bias(data_of<float>(x.decoder_bias)),
        output_weight(data_of<float>(x.output_weight)),
        output_bias(data_of<float>(x.output_bias)),
        silent(data_of<bool>(x.silent)),
        C(int32_t(x.tables.size(0))),
        P(int32_t(x.tables.size(2))),
        D(int32_t(x.output_weight.size(1))),
        V(int32_t(x.output_weight.size(0))),
        blank(int32_t(x.blank)),
        activation(static_cast<Activation>(x.activation)),
        hat(x.hat) {}

  // Elements of a tile's rows, which the joiner's output layer or its projection reads.
  PRUNED_RNNT_HOST_DEVICE int32_t tile_size() const {
    return kTileRows * tile_stride(D > P ? D : P);
  }
  // Elements of the widest loads of both weights.
  int vector_width() const {
    return std::min(widest_vector<float>(decoder_weight, P),
                    widest_vector<float>(output_weight, D));
  }

  RNNT_DEVICE float hidden(float am, float lm) const {
    const float x = am + lm;
    if (activation == Activation::kTanh) return activated<Activation::kTanh, float>(x);
    return activation == Activation::kRelu ? activated<Activation::kRelu, float>(x) : x;
  }

  // Element p of the predictor's output after a context: a sum over its places, and for several a
  // ReLU. A symbol outside the vocabulary is none.
  RNNT_DEVICE float predicted(const int32_t* context, int p) const {
    float sum = 0;
    for (int place = 0; place < C; ++place) {
      const uint32_t symbol = min(uint32_t(context[place]), uint32_t(V));
      const float added = tables[(int64_t(place) * (V + 1) + symbol) * P + p];
      sum = place == 0 ? added : sum + added;
    }
    return C > 1 ? activated<Activation::kRelu, float>(sum) : sum;
  }

  const float *tables, *decoder_weight, *decoder_bias, *output_weight, *output_bias;
  const bool* silent;
  int32_t C, P, D, V, blank;
  Activation activation;
  bool hat;
};

// Brings what will soon be read into the L2 cache.
RNNT_DEVICE void prefetch(const float* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Elements k .. k + 3 of a row of `inputs`, zero beyond its end.
template <int width>
RNNT_DEVICE void load_run(const float* row, int k, int inputs, float (&x)[kLaneInputs]) {
#pragma unroll
  for (int i = 0; i < kLaneInputs; i += width) {
    Vector<float, width> part{};
    if (k + i < inputs) part = load_vector<width>(row + k + i);
#pragma unroll
    for (int j = 0; j < width; ++j) x[i + j] = part.x[j];
  }
}

// sum += w x of a run of elements; w of the lane's two outputs, x of one row (see the header).
RNNT_DEVICE void add_run(const float (&w)[kLaneOutputs][kLaneInputs], const float (&x)[kLaneInputs],
                         float (&sum)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float w_high[kLaneOutputs][kLaneInputs], w_low[kLaneOutputs][kLaneInputs];
  float x_high[kLaneInputs], x_low[kLaneInputs], run[4];
  split(w[0], w_high[0], w_low[0]);
  split(w[1], w_high[1], w_low[1]);
  split(x, x_high, x_low);
  // The order of a sum's elements does not matter, so a tile's k and k + 4 may be neighbours.
  const auto multiply_all = [&](const auto& a, const float (&b)[kLaneInputs], bool add) {
#pragma unroll
    for (int k = 0; k < kLaneInputs; k += 2) {
      multiply(run, {a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]}, {b[k], b[k + 1]}, add || k > 0);
    }
  };
  multiply_all(w_low, x_high, false);
  multiply_all(w_high, x_low, true);
  multiply_all(w_high, x_high, true);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += run[i];
#else
  const int lane = threadIdx.x % 32, row = lane % 4 * kLaneRows;
  for (int source = 0; source < 4; ++source) {
#pragma unroll
    for (int k = 0; k < kLaneInputs; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = __shfl_sync(kAllLanes, w[i / kLaneRows][k], lane / 4 * 4 + source);
        sum[i] += factor * __shfl_sync(kAllLanes, x[k], (row + i % kLaneRows) * 4 + source);
      }
    }
  }
#endif
}

// use(part, r, o, y(r, o)), by increasing o, for the rows r of a tile x (kTileRows, stride) in
// shared memory and all outputs, by the whole block. A lane has two rows, part 0 and 1. Weights
// without gaps.
template <int width, typename Use>
RNNT_DEVICE void tile_product(const float* x, int stride, const float* __restrict__ weight,
                              const float* __restrict__ bias, int inputs, int outputs, Use&& use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  for (int first = warp * kTileOutputs; first < outputs; first += kSearchWarps * kTileOutputs) {
    const float* rows[kLaneOutputs];
#pragma unroll
    for (int j = 0; j < kLaneOutputs; ++j) {
      rows[j] = weight + int64_t(min(first + 8 * j + group, outputs - 1)) * inputs;
    }
    float sum[4] = {};
#pragma unroll 4
    for (int begin = 0; begin < inputs; begin += kTileInputs) {
      const int k = begin + lane % 4 * kLaneInputs;
      float w[kLaneOutputs][kLaneInputs], x_run[kLaneInputs];
#pragma unroll
      for (int j = 0; j < kLaneOutputs; ++j) load_run<width>(rows[j], k, inputs, w[j]);
      load_run<width>(x + group * stride, k, inputs, x_run);
      add_run(w, x_run, sum);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int output = first + 8 * (i / kLaneRows) + group, part = i % kLaneRows;
      if (output >= outputs) continue;
      use(part, lane % 4 * kLaneRows + part, output, sum[i] + bias[output]);
    }
  }
}

// Utterances of a block, at most `most`, with bytes(utterances) of dynamic shared memory. Blocks on
// half of the multiprocessors read as much as the L2 cache delivers, and more utterances in a block
// read the weights less often.
template <typename Bytes>
int64_t utterances_a_block(const Launcher& launch, const char* op, int64_t utterances, int64_t most,
                           Bytes&& bytes) {
  const size_t room = size_t(launch.shared_bytes());
  const int64_t blocks = std::max(1, launch.multiprocessors() / 2);
  int64_t found =
      std::clamp<int64_t>((utterances + blocks - 1) / blocks, 1, std::max<int64_t>(1, most));
  while (found > 1 && bytes(found) + kStaticBytes > room) --found;
  const size_t needed = bytes(found) + kStaticBytes;
  STD_TORCH_CHECK(needed <= room, "pruned_rnnt::", op, ": this model and beam need ", needed,
                  " bytes of shared memory, and a block of this GPU has at most ", room);
  return found;
}

}  // namespace pruned_rnnt::cuda
