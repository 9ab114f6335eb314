// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace tokenspeed::cpu {
namespace {

struct Candidate {
  const KernelTable* table;
  bool runs_here;
};

// Best first.
std::vector<Candidate> Candidates() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  return {{&avx512::kTable, avx512}, {&avx2::kTable, avx2}, {&baseline::kTable, true}};
#else
  return {{&baseline::kTable, true}};
#endif
}

const KernelTable* Best() {
  for (const Candidate& candidate : Candidates()) {
    if (candidate.runs_here) return candidate.table;
  }
  return &baseline::kTable;
}

const KernelTable* Find(const std::string& name, const std::string& setting) {
  for (const Candidate& candidate : Candidates()) {
    if (name != candidate.table->name) continue;
    if (candidate.runs_here) return candidate.table;
    throw std::invalid_argument(setting + ": this CPU does not have " + name);
  }
  throw std::invalid_argument(setting + ": must be avx512, avx2 or baseline");
}

const KernelTable* FromEnvironment() {
  const char* const wanted = std::getenv("TOKENSPEED_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return Best();
  return Find(wanted, std::string("TOKENSPEED_CPU_ISA=") + wanted);
}

std::atomic<const KernelTable*> chosen{nullptr};

}  // namespace

const KernelTable& Kernels() {
  const KernelTable* table = chosen.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = FromEnvironment();
    chosen.store(table, std::memory_order_release);
  }
  return *table;
}

void UseIsa(const std::string& name) {
  chosen.store(Find(name, "isa " + name), std::memory_order_release);
}

}  // namespace tokenspeed::cpu
