// SPDX-License-Identifier: MIT
//
// The kernels for the instruction set "avx2"; BUILD.bazel gives this file its compiler flags.

#define TS_CPU_ISA_NAMESPACE avx2
#define TS_CPU_ISA_NAME "avx2"
#include "kernels/tokenspeed_kernel/csrc/cpu/kernel_table.h"
