// Copies of single elements from global to shared memory that run beside the arithmetic. Before
// compute capability 8.0 they are ordinary copies.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

template <typename scalar>
__device__ __forceinline__ void copy_async(scalar* shared, const scalar* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  static_assert(sizeof(scalar) == 4 || sizeof(scalar) == 8);
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(global),
               "n"(sizeof(scalar))
               : "memory");
#else
  *shared = *global;
#endif
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `groups` of this thread's groups, the latest, are on their way.
template <int groups>
__device__ __forceinline__ void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
#endif
}

}  // namespace cuda
}  // namespace pruned_rnnt
