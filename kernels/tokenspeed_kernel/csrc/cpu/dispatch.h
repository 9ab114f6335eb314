// SPDX-License-Identifier: MIT
//
// Which kernels this machine runs: the table of the best instruction set that the CPU has and that
// TOKENSPEED_CPU_ISA (avx512, avx2 or baseline) allows. Chosen at first use; tests choose others
// later.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_DISPATCH_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_DISPATCH_H_

#include <string>

#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"

namespace tokenspeed::cpu {

#if defined(__x86_64__)
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
#endif
namespace baseline {
extern const KernelTable kTable;
}

// Throws std::invalid_argument when TOKENSPEED_CPU_ISA names a set that is unknown or that the CPU
// lacks.
const KernelTable& Kernels();

// Switches every later call to the named set. Throws like Kernels().
void UseIsa(const std::string& name);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_DISPATCH_H_
