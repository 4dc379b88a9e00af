// Size of an op's `work`, which halves.cuh divides; also for code without a CUDA compiler.
#pragma once

#include <cstdint>

namespace pruned_rnnt::cuda {

// Elements for each utterance, with up to `columns` nodes of a frame.
constexpr int64_t cut_elements(int64_t columns, int64_t frames) {
  return 5 * columns + 4 * (frames + 2);
}

}  // namespace pruned_rnnt::cuda
