// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/kv_cache.h"

#include <cstring>

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

namespace tokenspeed::cpu {
namespace {

constexpr int64_t kBytesPerChunk = 256 * 1024;

void StoreTokens(void* context, int64_t begin, int64_t end) {
  const auto& args = *static_cast<const StoreKvArgs*>(context);
  const size_t head_bytes = static_cast<size_t>(args.head_dim) * sizeof(float);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t block = args.slot_mapping[token] / args.block_size;
    const int64_t offset = args.slot_mapping[token] % args.block_size;
    for (int64_t head = 0; head < args.num_kv_heads; ++head) {
      const int64_t from = head * args.head_dim;
      const int64_t to = (head * args.block_size + offset) * args.head_dim;
      std::memcpy(args.k_cache + block * args.k_block_stride + to,
                  args.k + token * args.k_stride + from, head_bytes);
      std::memcpy(args.v_cache + block * args.v_block_stride + to,
                  args.v + token * args.v_stride + from, head_bytes);
    }
  }
}

}  // namespace

void StoreKv(const StoreKvArgs& args) {
  // Padding tokens share slots, so tokens stay on one thread: two writers of one slot would race.
  StoreTokens(const_cast<StoreKvArgs*>(&args), 0, args.num_tokens);
}

void StoreLatent(const StoreLatentArgs& args) {
  const int64_t width = args.latent_dim + args.key_dim;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t slot = args.slot_mapping[token];
    float* const row =
        args.cache + slot / args.block_size * args.block_stride + slot % args.block_size * width;
    std::memcpy(row, args.latent + token * args.latent_stride,
                static_cast<size_t>(args.latent_dim) * sizeof(float));
    std::memcpy(row + args.latent_dim, args.key + token * args.key_stride,
                static_cast<size_t>(args.key_dim) * sizeof(float));
  }
}

namespace {

struct CopyJob {
  uint8_t* cache;
  int64_t block_bytes;
  const int32_t* pairs;
};

void CopyPairs(void* context, int64_t begin, int64_t end) {
  const auto& job = *static_cast<const CopyJob*>(context);
  for (int64_t i = begin; i < end; ++i) {
    std::memcpy(job.cache + job.pairs[2 * i + 1] * job.block_bytes,
                job.cache + job.pairs[2 * i] * job.block_bytes,
                static_cast<size_t>(job.block_bytes));
  }
}

}  // namespace

void CopyBlocks(uint8_t* cache, int64_t block_bytes, const int32_t* pairs, int64_t num_pairs) {
  CopyJob job{cache, block_bytes, pairs};
  const int64_t grain = block_bytes < kBytesPerChunk ? kBytesPerChunk / (block_bytes + 1) + 1 : 1;
  ThreadPool::Global().ParallelFor(num_pairs, grain, &CopyPairs, &job);
}

}  // namespace tokenspeed::cpu
