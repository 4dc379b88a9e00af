// Loads and stores of several neighbouring elements at once, up to 16 bytes a thread.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/common/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

template <typename scalar, int count>
struct alignas(sizeof(scalar) * count) Vector {
  scalar x[count];
};

// The plain type of that many bytes: a struct of 16-bit elements would be moved one by one.
template <size_t bytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};

template <int count, typename scalar>
__device__ __forceinline__ Vector<scalar, count> load_vector(const scalar* address) {
  using Word = typename WordOf<sizeof(scalar) * count>::type;
  const Word word = *reinterpret_cast<const Word*>(address);
  Vector<scalar, count> value;
  memcpy(&value, &word, sizeof(word));
  return value;
}

template <int count, typename scalar>
__device__ __forceinline__ void store_vector(scalar* address, const Vector<scalar, count>& value) {
  using Word = typename WordOf<sizeof(scalar) * count>::type;
  Word word;
  memcpy(&word, &value, sizeof(word));
  *reinterpret_cast<Word*>(address) = word;
}

template <int count, typename scalar>
__device__ __forceinline__ void store_zeros(scalar* address) {
  using Word = typename WordOf<sizeof(scalar) * count>::type;
  *reinterpret_cast<Word*>(address) = Word{};
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
