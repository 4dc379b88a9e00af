// Rows of logits short enough for one thread each: a block copies its rows, which are contiguous,
// through shared memory with 16-byte accesses.
//
// Axes: R rows, V vocabulary.
#pragma once

#include "cuda/common/vector_access.cuh"

namespace pruned_rnnt::cuda {

constexpr int kShortThreads = 128;
constexpr size_t kShortBytes = 48 * 1024;  // shared memory without opt-in

// Whether this suits rows of V elements, `stride` apart from `data` on.
template <typename scalar>
bool are_short_rows(const void* data, int64_t V, int64_t stride) {
  return stride == V && V * sizeof(scalar) * kShortThreads <= kShortBytes &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

inline uint32_t short_row_blocks(int64_t rows) {
  return uint32_t((rows + kShortThreads - 1) / kShortThreads);
}

// Copies `count` elements between addresses that are multiples of 16 bytes, by all threads.
template <typename scalar>
RNNT_DEVICE void copy_block(const scalar* source, int32_t count, scalar* target) {
  constexpr int width = 16 / sizeof(scalar);
  const int32_t whole = count / width * width;
#pragma unroll 4
  for (int32_t i = threadIdx.x * width; i < whole; i += kShortThreads * width) {
    store_vector<width>(target + i, load_vector<width>(source + i));
  }
  for (int32_t i = whole + threadIdx.x; i < count; i += kShortThreads) target[i] = source[i];
}

// The widest access to a row in shared memory: rows begin at multiples of V elements.
template <typename scalar>
int short_row_width(int64_t V) {
  return widest_vector<scalar>(nullptr, V);
}

}  // namespace pruned_rnnt::cuda
