// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tokenspeed::cpu {
namespace {

struct Candidate {
  const KernelTable* table;
  bool runs_here;
};

const KernelTable& Choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const Candidate candidates[] = {
      {&avx512::kTable, avx512}, {&avx2::kTable, avx2}, {&baseline::kTable, true}};
#else
  const Candidate candidates[] = {{&baseline::kTable, true}};
#endif
  const char* const wanted = std::getenv("TOKENSPEED_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    for (const Candidate& candidate : candidates) {
      if (candidate.runs_here) return *candidate.table;
    }
  }
  for (const Candidate& candidate : candidates) {
    if (std::string(wanted) != candidate.table->name) continue;
    if (candidate.runs_here) return *candidate.table;
    throw std::invalid_argument(std::string("TOKENSPEED_CPU_ISA=") + wanted +
                                ": this CPU does not have it");
  }
  throw std::invalid_argument(std::string("TOKENSPEED_CPU_ISA=") + wanted +
                              ": must be avx512, avx2 or baseline");
}

}  // namespace

const KernelTable& Kernels() {
  static const KernelTable& table = Choose();
  return table;
}

}  // namespace tokenspeed::cpu
