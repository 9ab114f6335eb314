// SPDX-License-Identifier: MIT
//
// Gathers the kernels of the instruction set that the including file is compiled for into its
// table. Included once by each kernels_<isa>.cc, after TS_CPU_ISA_NAMESPACE and TS_CPU_ISA_NAME are
// defined.

#include "kernels/tokenspeed_kernel/csrc/cpu/attention.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/dispatch.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/elementwise.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/experts.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/linear.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/reductions.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {

const KernelTable kTable = {
    .name = TS_CPU_ISA_NAME,
    .linear = &Linear,
    .embedding = &Embedding,
    .rms_norm = &RmsNorm,
    .silu_and_mul = &SiluAndMul,
    .clamped_swiglu = &ClampedSwiglu,
    .rope = &Rope,
    .attention_item = &AttendItem,
    .attention_combine = &CombineItem,
    .route = &Route,
    .grouped_linear = &GroupedLinear,
    .weighted_sum = &WeightedSum,
    .penalties = &Penalties,
    .argmax = &ArgMax,
    .scale = &Scale,
    .group_max = &GroupMax,
    .collect = &Collect,
    .sum_exp = &SumExp,
    .best_noisy = &BestNoisy,
};

}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE
