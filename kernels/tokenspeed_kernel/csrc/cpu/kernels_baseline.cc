// SPDX-License-Identifier: MIT
//
// The kernels for the instruction set "baseline"; BUILD.bazel gives this file its compiler flags.

#define TS_CPU_ISA_NAMESPACE baseline
#define TS_CPU_ISA_NAME "baseline"
#include "kernels/tokenspeed_kernel/csrc/cpu/kernel_table.h"
