// Asynchronous copies of single elements or pairs from global to shared memory (ordinary copies
// before compute capability 8.0).
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

template <typename scalar>
RNNT_DEVICE void copy_async(scalar* shared, const scalar* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  static_assert(sizeof(scalar) == 4 || sizeof(scalar) == 8 || sizeof(scalar) == 16);
  const uint32_t target = uint32_t(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(global),
               "n"(sizeof(scalar))
               : "memory");
#else
  *shared = *global;
#endif
}

// Copies the first `elements` of `width` elements and writes zeros for the others. `global` is not
// read if there are none.
template <int width>
RNNT_DEVICE void copy_async_or_zeros(float* shared, const float* global, int elements) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  static_assert(width == 1 || width == 4);
  const uint32_t target = uint32_t(__cvta_generic_to_shared(shared));
  if constexpr (width == 4) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global),
                 "r"(elements * 4)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(global),
                 "r"(elements * 4)
                 : "memory");
  }
#else
  for (int i = 0; i < width; ++i) shared[i] = i < elements ? global[i] : 0.0f;
#endif
}

// Ends a group of copies of this thread.
RNNT_DEVICE void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the latest `groups` of this thread's groups are in flight.
template <int groups>
RNNT_DEVICE void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
#endif
}

}  // namespace pruned_rnnt::cuda
