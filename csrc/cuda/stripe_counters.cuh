// Counters in shared memory by which warps of a block follow each other without a barrier.
#pragma once

#include "cuda/arithmetic.cuh"

namespace pruned_rnnt {
namespace cuda {

__device__ __forceinline__ int32_t look(const int32_t& counter) {
  return *const_cast<const volatile int32_t*>(&counter);
}

// Waits, as a warp, until the counter has come to `least`. Returns what it has reached, the same in
// all lanes; what was written before it was published can be read.
__device__ __forceinline__ int32_t wait_for(const int32_t& counter, int32_t least) {
  int32_t reached;
  while ((reached = look(counter)) < least) __nanosleep(20);
  reached = __shfl_sync(kAllLanes, reached, 0);
  __threadfence_block();
  return reached;
}

// Sets the counter after all lanes have read or written what it stands for.
__device__ __forceinline__ void publish(int32_t& counter, int32_t value) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    __threadfence_block();
    *const_cast<volatile int32_t*>(&counter) = value;
  }
}

}  // namespace cuda
}  // namespace pruned_rnnt
