// output_layer: weight and bias in the dtype of the products, with rows of zeros. Contract:
// pruned_rnnt/ops/joiner/fused_log_probs.py. And both in one matrix, for the ops over active rows.
//
// Axes: V vocabulary, V' rows of the result, D joiner dim.
#include <algorithm>

#include "contracts/joiner.h"
#include "cuda/common/vector_access.cuh"
#include "cuda/whole_lattice/active_ops.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1056;

// The elements of `padded` from `size` on are 0. The bias is what the last block copies.
template <typename source>
__global__ void __launch_bounds__(kThreads)
    output_layer_kernel(const source* __restrict__ weight, const source* __restrict__ bias,
                        int64_t size, int64_t padded_size, int32_t V, int32_t padded_V,
                        BFloat16* __restrict__ padded_weight, BFloat16* __restrict__ padded_bias) {
  const auto rounded = [](source x) {
    return static_cast<BFloat16>(static_cast<acc_type<source>>(x));
  };
  const BFloat16 nothing = static_cast<BFloat16>(0.0f);
  if (blockIdx.x == gridDim.x - 1) {
    for (int32_t v = threadIdx.x; v < padded_V; v += kThreads) {
      padded_bias[v] = v < V ? rounded(bias[v]) : nothing;
    }
    return;
  }
  const int64_t threads = int64_t(gridDim.x - 1) * kThreads;
#pragma unroll 4
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < padded_size; i += threads) {
    padded_weight[i] = i < size ? rounded(weight[i]) : nothing;
  }
}

__global__ void __launch_bounds__(kThreads)
    weight_and_bias_kernel(const BFloat16* __restrict__ weight, const BFloat16* __restrict__ bias,
                           int32_t D, int32_t vectors, BFloat16* __restrict__ layer) {
  constexpr int width = int(kBiasColumns);
  const int32_t pitch = D / width + 1, i = int32_t(blockIdx.x * kThreads + threadIdx.x);
  if (i >= vectors) return;
  const int32_t row = i / pitch, column = (i - row * pitch) * width;
  Vector<BFloat16, width> value{};
  if (column < D) {
    value = load_vector<width>(weight + int64_t(row) * D + column);
  } else {
    value.x[0] = bias[row];
  }
  store_vector<width>(layer + int64_t(i) * width, value);
}

void output_layer(const Launcher& launch, const View& weight, const View& bias,
                  const View& padded_weight, const View& padded_bias) {
  const int64_t size = padded_weight.numel();
  const int64_t blocks = std::min(kMostBlocks, (size + 4 * kThreads - 1) / (4 * kThreads)) + 1;
  dispatch_floating(weight.scalar_type(), "output_layer", [&](auto zero) {
    using source = decltype(zero);
    launch(output_layer_kernel<source>, uint32_t(blocks), kThreads, 0, data_of<source>(weight),
           data_of<source>(bias), weight.numel(), size, int32_t(bias.size(0)),
           int32_t(padded_bias.size(0)), mutable_data_of<BFloat16>(padded_weight),
           mutable_data_of<BFloat16>(padded_bias));
  });
}

PRUNED_RNNT_CUDA_OP(output_layer)

}  // namespace

Tensor weight_and_bias(const Launcher& launch, const Tensor& weight, const Tensor& bias) {
  const int64_t columns = weight.size(0), D = weight.size(1), pitch = D + kBiasColumns;
  const Tensor layer = torch::stable::new_empty(weight, {columns, pitch});
  const int32_t vectors = int32_t(columns * pitch / kBiasColumns);
  launch(weight_and_bias_kernel, uint32_t((vectors + kThreads - 1) / kThreads), kThreads, 0,
         data_of<BFloat16>(weight), data_of<BFloat16>(bias), int32_t(D), vectors,
         mutable_data_of<BFloat16>(layer));
  return layer;
}

}  // namespace pruned_rnnt::cuda
