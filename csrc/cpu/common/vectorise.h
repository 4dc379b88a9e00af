// Hot loops compiled for several instruction sets in one portable binary.
//
// A hot loop is a struct with `template <...> static PRUNED_RNNT_INLINE auto run(arguments...)`.
// run_vectorised<Loop>(arguments...) calls the version for the widest instruction set of this
// processor that ATEN_CPU_CAPABILITY (default, avx2 or avx512), which limits torch's kernels too,
// allows. Every call makes this choice, so a loop should run for a microsecond or more.
#pragma once

#include <cstdlib>
#include <string_view>

#include "log_math.h"

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#define PRUNED_RNNT_X86_VERSIONS 1
#endif

namespace pruned_rnnt {

#ifdef PRUNED_RNNT_X86_VERSIONS

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

inline InstructionSet detect_instruction_set() {
  __builtin_cpu_init();
  const char* wanted = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view limit = wanted != nullptr ? wanted : "";
  if (limit == "default") return InstructionSet::kBaseline;
  if (limit != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return InstructionSet::kAvx2;
  }
  return InstructionSet::kBaseline;
}

inline const InstructionSet instruction_set = detect_instruction_set();

template <typename Loop, typename... Arguments>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) auto run_avx512(
    Arguments... arguments) {
  return Loop::run(arguments...);
}

template <typename Loop, typename... Arguments>
__attribute__((target("avx2,fma"))) auto run_avx2(Arguments... arguments) {
  return Loop::run(arguments...);
}

template <typename Loop, typename... Arguments>
auto run_vectorised(Arguments... arguments) {
  switch (instruction_set) {
    case InstructionSet::kAvx512:
      return run_avx512<Loop>(arguments...);
    case InstructionSet::kAvx2:
      return run_avx2<Loop>(arguments...);
    default:
      return Loop::run(arguments...);
  }
}

#else

template <typename Loop, typename... Arguments>
auto run_vectorised(Arguments... arguments) {
  return Loop::run(arguments...);
}

#endif

}  // namespace pruned_rnnt
