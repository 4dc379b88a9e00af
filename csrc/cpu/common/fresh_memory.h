// Huge pages for large outputs: with pages of 4 KiB, the first write to a gradient of some hundred
// megabytes takes longer in page faults than in arithmetic.
#pragma once

#include <cstdint>

#include "stable.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace pruned_rnnt {

// Asks for huge pages if the tensor is large; the system may ignore this.
inline void expect_full_write(const View& output) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t huge_page = uintptr_t{1} << 21;
  const int64_t bytes = output.numel() * element_bytes(output.scalar_type());
  if (bytes < static_cast<int64_t>(8 * huge_page)) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(output.data_ptr());
  const uintptr_t begin = (address + huge_page - 1) & ~(huge_page - 1);
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) & ~(huge_page - 1);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)output;
#endif
}

}  // namespace pruned_rnnt
