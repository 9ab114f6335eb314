// SPDX-License-Identifier: MIT
//
// Writes into the paged KV cache and copies of its blocks: memory moves, the same on every
// instruction set. Called by module.cc, which has checked slots and block numbers.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_KV_CACHE_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_KV_CACHE_H_

#include <cstdint>

#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"

namespace tokenspeed::cpu {

// Each token's keys and values to its slot = block * block_size + offset.
void StoreKv(const StoreKvArgs& args);

// Each token's latent and rotated key, side by side, to its slot.
void StoreLatent(const StoreLatentArgs& args);

// pairs: (source, destination) block numbers; no block is both.
void CopyBlocks(uint8_t* cache, int64_t block_bytes, const int32_t* pairs, int64_t num_pairs);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_KV_CACHE_H_
