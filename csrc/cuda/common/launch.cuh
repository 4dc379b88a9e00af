// Launches kernels on the device of a tensor and on torch's current stream, without waiting.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstddef>

#include "cuda/common/blas.cuh"

#define RNNT_DEVICE __device__ __forceinline__

namespace pruned_rnnt::cuda {

// torch's current stream, by a function looked up at run time: so the library links, and its
// symbols can be checked, with a torch without CUDA.
inline cudaStream_t current_stream(int32_t device) {
  using Shim = AOTITorchError (*)(int32_t, void**);
  static const Shim shim = TorchFunction("aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(shim(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check(cudaError_t status, const char* what) {
  const bool cannot_run =
      status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion || status == cudaErrorInsufficientDriver;
  STD_TORCH_CHECK(status == cudaSuccess, "pruned_rnnt: ", what, ": ", cudaGetErrorString(status),
                  cannot_run ? "; compile the kernels on this machine, or for its GPU with "
                               "PRUNED_RNNT_CUDA_ARCHITECTURES (docs/reference/backends.md), or "
                               "set PRUNED_RNNT_BACKEND=fallback for plain torch"
                             : "");
}

// Makes a device current for its lifetime.
class Launcher {
 public:
  explicit Launcher(int32_t device)
      : device_(device), guard_(device), stream_(current_stream(device)) {}

  // The most shared memory that a block may have.
  int shared_bytes() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }

  cudaStream_t stream() const { return stream_; }

  // Matrix products on this device and stream.
  const Blas& blas() const {
    if (!blas_.has_value()) blas_.emplace(stream_);
    return *blas_;
  }

  // Runs kernel(arguments...) with `shared` bytes of dynamic shared memory.
  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                  Arguments... arguments) const {
    // Kernels must opt in to more than 48 KiB, static arrays included; 32 KiB leaves room for them.
    if (shared > 32 * 1024) {
      check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared)),
            "requesting shared memory");
    }
    kernel<<<grid, block, shared, stream_>>>(static_cast<Parameters>(arguments)...);
    check(cudaGetLastError(), "launching a kernel");
  }

 private:
  int attribute(cudaDeviceAttr name) const {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, device_), "reading the device");
    return value;
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
  mutable std::optional<Blas> blas_;
};

// The dynamic shared memory of a block, as an array of `scalar`.
template <typename scalar>
__device__ scalar* dynamic_shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<scalar*>(bytes);
}

}  // namespace pruned_rnnt::cuda
