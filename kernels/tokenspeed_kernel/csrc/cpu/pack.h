// SPDX-License-Identifier: MIT
//
// Re-ordering of weights into the "cpu_rows16" layout of weight_format.h, once at load. Values do
// not change: bits are moved. Called by the Python wrapper of `prepare_weight`; runs on the thread
// pool.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_PACK_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_PACK_H_

#include <cstdint>

#include "kernels/tokenspeed_kernel/csrc/cpu/weight_format.h"

namespace tokenspeed::cpu {

// source: n rows of k / block_values * source_bytes bytes. packed: PackedBytes(format, n, k) bytes.
// k must be a multiple of the format's block_values.
void PackWeight(WeightFormat format, const uint8_t* source, int64_t n, int64_t k, uint8_t* packed);

// Asks for huge pages behind the whole pages of a buffer; the system may have none.
void AdviseHugePages(uint8_t* buffer, int64_t num_bytes);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_PACK_H_
