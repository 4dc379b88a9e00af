// How kernels are launched: on the device of a tensor, on torch's current stream, without waiting.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstddef>

#include "cuda/common/blas.cuh"

namespace pruned_rnnt {
namespace cuda {

// torch's current stream. The shim is looked up at run time in the libtorch_cuda that is already
// loaded, so that the library links, and its symbols can be checked, beside a torch without CUDA.
inline cudaStream_t current_stream(int32_t device) {
  using Shim = AOTITorchError (*)(int32_t, void**);
  static const Shim shim = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        torch_cuda != nullptr ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Shim>(symbol);
  }();
  STD_TORCH_CHECK(shim != nullptr, "pruned_rnnt: the loaded torch has no CUDA streams");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(shim(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check(cudaError_t status, const char* what) {
  STD_TORCH_CHECK(status == cudaSuccess, "pruned_rnnt: ", what, ": ", cudaGetErrorString(status));
}

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;  // what one block may have
};

// Makes a device current while it lives.
class Launcher {
 public:
  explicit Launcher(int32_t device)
      : device_(device), guard_(device), stream_(current_stream(device)) {}

  DeviceLimits limits() const {
    DeviceLimits limits{};
    check(cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device_),
          "reading the device");
    check(cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                 device_),
          "reading the device");
    return limits;
  }

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
    // More than this has to be asked for.
    if (shared > 48 * 1024) {
      check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared)),
            "asking for shared memory");
    }
    kernel<<<grid, block, shared, stream_>>>(static_cast<Parameters>(arguments)...);
    check(cudaGetLastError(), "launching a kernel");
  }

 private:
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

}  // namespace cuda
}  // namespace pruned_rnnt
