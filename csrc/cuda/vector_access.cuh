// Loads and stores of several neighbouring elements at once, up to 16 bytes a thread.
#pragma once

#include <cstdint>

#include "cuda/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

template <typename scalar, int count>
struct alignas(sizeof(scalar) * count) Vector {
  scalar x[count];
};

template <int count, typename scalar>
__device__ __forceinline__ Vector<scalar, count> load_vector(const scalar* address) {
  return *reinterpret_cast<const Vector<scalar, count>*>(address);
}

template <int count, typename scalar>
__device__ __forceinline__ void store_vector(scalar* address, const Vector<scalar, count>& value) {
  *reinterpret_cast<Vector<scalar, count>*>(address) = value;
}

template <int count, typename scalar>
__device__ __forceinline__ void store_zeros(scalar* address) {
  Vector<scalar, count> zeros;
#pragma unroll
  for (int i = 0; i < count; ++i) zeros.x[i] = static_cast<scalar>(0.0f);
  store_vector<count>(address, zeros);
}

// The widest vector of 16 or 8 bytes, in elements, with which rows of `stride` elements from `data`
// on can be read; else 1.
template <typename scalar>
int widest_vector(const void* data, int64_t stride) {
  for (const size_t bytes : {16, 8}) {
    const int count = static_cast<int>(bytes / sizeof(scalar));
    if (reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride % count == 0) return count;
  }
  return 1;
}

// Calls work(std::integral_constant<int, count>) for a vector width that widest_vector gave.
template <typename scalar, typename Work>
void dispatch_width(int count, Work&& work) {
  switch (count) {
    case 16 / sizeof(scalar):
      return work(std::integral_constant<int, 16 / sizeof(scalar)>());
    case 8 / sizeof(scalar):
      return work(std::integral_constant<int, 8 / sizeof(scalar)>());
    default:
      return work(std::integral_constant<int, 1>());
  }
}

}  // namespace cuda
}  // namespace pruned_rnnt
