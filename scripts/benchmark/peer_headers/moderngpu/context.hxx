// What optimized_transducer needs of moderngpu, so that it builds where that cannot be fetched.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace mgpu {

enum memory_space_t { memory_space_device, memory_space_host };

class standard_context_t {
 public:
  standard_context_t(bool, cudaStream_t stream) : stream_(stream) {}
  virtual ~standard_context_t() = default;

  virtual void* alloc(std::size_t size, memory_space_t space) = 0;
  virtual void free(void* pointer, memory_space_t space) = 0;
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_;
};

}  // namespace mgpu
