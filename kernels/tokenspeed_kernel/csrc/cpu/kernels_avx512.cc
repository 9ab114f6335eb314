// SPDX-License-Identifier: MIT
//
// The kernels for the instruction set "avx512"; BUILD.bazel gives this file its compiler flags.

#define TS_CPU_ISA_NAMESPACE avx512
#define TS_CPU_ISA_NAME "avx512"
#include "kernels/tokenspeed_kernel/csrc/cpu/kernel_table.h"
