// Tasks on torch's thread pool. Free workers take the next piece, because utterances of one batch
// differ in length and padded rows cost almost nothing.
#pragma once

#include <algorithm>
#include <atomic>

#include "stable.h"

namespace pruned_rnnt {

// Calls work(begin, end) from several threads, on pieces of 0..count of at most `grain` tasks,
// which must not depend on each other.
template <typename Work>
void parallel_tasks(int64_t count, int64_t grain, const Work& work) {
  if (count <= 0) return;
  const int64_t pieces = (count + grain - 1) / grain;
  const int64_t workers = std::min<int64_t>(torch::stable::get_num_threads(), pieces);
  if (workers <= 1) {
    work(int64_t{0}, count);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      work(begin, std::min(begin + grain, count));
    }
  });
}

}  // namespace pruned_rnnt
