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

// Between blocks of all caches and packed rows that hold one of each, side by side. caches, packed
// and pairs are addresses: int64 (address, bytes of a block), bytes, int32 (block, row). On the
// calling thread alone: steps that run meanwhile have the pool.
void MoveBlocks(uintptr_t caches, int64_t num_caches, uintptr_t packed, uintptr_t pairs,
                int64_t num_pairs, bool to_packed);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_KV_CACHE_H_
