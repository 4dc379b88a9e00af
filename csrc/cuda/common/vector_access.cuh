// Loads and stores of neighbouring elements in one access, up to 16 bytes a thread.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

template <typename scalar, int count>
struct alignas(sizeof(scalar) * count) Vector {
  scalar x[count];
};

// The plain type of 2, 4, 8 or 16 bytes: a struct of 16-bit elements would be moved one by one.
template <size_t bytes>
using WordOf = std::conditional_t<
    bytes == 16, uint4,
    std::conditional_t<bytes == 8, uint2, std::conditional_t<bytes == 4, uint32_t, uint16_t>>>;

template <int count, typename scalar>
RNNT_DEVICE Vector<scalar, count> load_vector(const scalar* address) {
  using Word = WordOf<sizeof(scalar) * count>;
  static_assert(sizeof(Word) == sizeof(scalar) * count);
  const Word word = *reinterpret_cast<const Word*>(address);
  Vector<scalar, count> value;
  memcpy(&value, &word, sizeof(word));
  return value;
}

template <int count, typename scalar>
RNNT_DEVICE void store_vector(scalar* address, const Vector<scalar, count>& value) {
  using Word = WordOf<sizeof(scalar) * count>;
  Word word;
  memcpy(&word, &value, sizeof(word));
  *reinterpret_cast<Word*>(address) = word;
}

template <int count, typename scalar>
RNNT_DEVICE void store_zeros(scalar* address) {
  using Word = WordOf<sizeof(scalar) * count>;
  *reinterpret_cast<Word*>(address) = Word{};
}

// Elements of the widest vector (16 or 8 bytes) that can read rows `stride` elements apart from
// `data` on; else 1.
template <typename scalar>
int widest_vector(const void* data, int64_t stride) {
  for (const size_t bytes : {16, 8}) {
    const int count = static_cast<int>(bytes / sizeof(scalar));
    if (reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride % count == 0) return count;
  }
  return 1;
}

// Calls work(std::integral_constant<int, count>) for a result of widest_vector.
template <typename scalar, typename Work>
void dispatch_width(int count, Work&& work) {
  constexpr int whole = 16 / sizeof(scalar), half = 8 / sizeof(scalar);
  if (count == whole) return work(std::integral_constant<int, whole>());
  if (count == half) return work(std::integral_constant<int, half>());
  work(std::integral_constant<int, 1>());
}

}  // namespace pruned_rnnt::cuda
