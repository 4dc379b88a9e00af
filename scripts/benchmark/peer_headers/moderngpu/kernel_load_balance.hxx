#pragma once

#include "context.hxx"

namespace mgpu {

// output[i] = the segment that element i lies in; offsets[k] is where segment k begins.
static __global__ void segment_of_elements(int count, const int* offsets, int segments,
                                           int* output) {
  const int element = blockIdx.x * blockDim.x + threadIdx.x;
  if (element >= count) return;
  int low = 0, high = segments;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (offsets[middle] <= element ? low : high) = middle;
  }
  output[element] = low;
}

inline void load_balance_search(int count, const int* offsets, int segments, int* output,
                                standard_context_t& context) {
  constexpr int threads = 256;
  segment_of_elements<<<(count + threads - 1) / threads, threads, 0, context.stream()>>>(
      count, offsets, segments, output);
}

}  // namespace mgpu
