// scale: several tensors times one number, or one for each index of their first dimension, in one
// launch. Contract: pruned_rnnt/ops/common/autograd.py.
//
// Axes: N batch.
#include <algorithm>
#include <array>
#include <vector>

#include "contracts/joiner.h"
#include "cuda/common/device_op.cuh"
#include "cuda/common/vector_access.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;
// Tensors of a launch, vectors of a thread, and blocks along an index of the first dimension.
constexpr size_t kMostTensors = 8;
constexpr int64_t kVectorsEach = 4, kMostBlocks = 1024, kMostIndices = 32768;

struct Scaled {
  const void* source;
  void* result;
  int64_t size;  // elements that share a factor
  ScalarType type;
};

using ScaledTensors = std::array<Scaled, kMostTensors>;

template <typename scalar>
RNNT_DEVICE void scale_elements(const Scaled& tensor, int64_t first, acc_type<scalar> factor) {
  constexpr int width = 16 / sizeof(scalar);
  const scalar* const source = static_cast<const scalar*>(tensor.source) + first;
  scalar* const result = static_cast<scalar*>(tensor.result) + first;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = int64_t(gridDim.x) * kThreads;
  const auto scaled = [&](scalar x) {
    return static_cast<scalar>(static_cast<acc_type<scalar>>(x) * factor);
  };
  int64_t done = 0;
  if ((reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(result)) % 16 == 0) {
    done = tensor.size / width * width;
#pragma unroll 2
    for (int64_t i = thread * width; i < done; i += threads * width) {
      Vector<scalar, width> x = load_vector<width>(source + i);
#pragma unroll
      for (int k = 0; k < width; ++k) x.x[k] = scaled(x.x[k]);
      store_vector<width>(result + i, x);
    }
  }
#pragma unroll 4
  for (int64_t i = done + thread; i < tensor.size; i += threads) result[i] = scaled(source[i]);
}

// blockIdx.y is the tensor, blockIdx.z the index of the first dimension.
template <typename real>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ ScaledTensors tensors, const real* __restrict__ factors,
                 int64_t N) {
  const Scaled& tensor = tensors[blockIdx.y];
  for (int64_t n = blockIdx.z; n < N; n += gridDim.z) {
    const real factor = factors[n];
    // The usual factor: nothing to do.
    if (factor == real(1) && tensor.source == tensor.result) continue;
    const int64_t first = n * tensor.size;
    switch (tensor.type) {
      case ScalarType::Double:
        scale_elements<double>(tensor, first, factor);
        break;
      case ScalarType::Float:
        scale_elements<float>(tensor, first, factor);
        break;
      case ScalarType::Half:
        scale_elements<Half>(tensor, first, factor);
        break;
      default:
        scale_elements<BFloat16>(tensor, first, factor);
    }
  }
}

void scale(const Launcher& launch, std::optional<std::vector<Tensor>> sources, const View& factors,
           std::vector<Tensor> results) {
  const int64_t N = factors.dim() == 0 ? 1 : factors.size(0);
  if (N == 0) return;
  for (size_t begin = 0; begin < results.size(); begin += kMostTensors) {
    const size_t count = std::min(kMostTensors, results.size() - begin);
    ScaledTensors tensors{};
    int64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& result = results[begin + i];
      const Tensor& source = sources.has_value() ? (*sources)[begin + i] : result;
      tensors[i] = {source.data_ptr(), result.data_ptr(), source.numel() / N, source.scalar_type()};
      bytes = std::max(bytes, tensors[i].size * element_bytes(tensors[i].type));
    }
    if (bytes == 0) continue;
    const int64_t share = 16 * kThreads * kVectorsEach;
    const dim3 grid(uint32_t(std::min((bytes + share - 1) / share, kMostBlocks)), uint32_t(count),
                    uint32_t(std::min(N, kMostIndices)));
    dispatch_accumulator(factors.scalar_type(), "scale", [&](auto zero) {
      using real = decltype(zero);
      launch(scale_kernel<real>, grid, kThreads, 0, tensors, data_of<real>(factors), N);
    });
  }
}

PRUNED_RNNT_CUDA_OP(scale)

}  // namespace
}  // namespace pruned_rnnt::cuda
