// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/kv_cache.h"

#include <cstring>

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

namespace tokenspeed::cpu {
namespace {

constexpr int64_t kBytesPerChunk = 256 * 1024;

// The nearest e4m3 number, ties to even, at most 448; NaN stays NaN.
uint8_t ToFp8(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  if (value != value) return static_cast<uint8_t>(sign | 0x7f);
  float magnitude = value < 0 ? -value : value;
  if (magnitude > 448.0f) magnitude = 448.0f;
  if (magnitude < 0x1p-6f) {
    // Subnormal: a whole number of 2^-9, rounded by the addition.
    const float shifted = magnitude * 0x1p9f + 0x1p23f;
    std::memcpy(&bits, &shifted, 4);
    return static_cast<uint8_t>(sign | (bits & 0xf));
  }
  std::memcpy(&bits, &magnitude, 4);
  bits += 0x7ffff + (bits >> 20 & 1);
  return static_cast<uint8_t>(sign | ((bits >> 20) - (120 << 3)));
}

// Ties to even; NaN stays NaN.
uint16_t ToBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The scale that brings a row's largest magnitude to the largest e4m3 number.
float RowScale(const float* row, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = row[i] < 0 ? -row[i] : row[i];
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest > 0.0f ? largest / 448.0f : 1.0f;
}

// One head of one token. scale: where its scale goes, or null.
void StoreRow(KvFormat format, const float* row, int64_t count, uint8_t* to, float* scale) {
  if (format == KvFormat::kF32) {
    std::memcpy(to, row, static_cast<size_t>(count) * sizeof(float));
  } else if (format == KvFormat::kBf16) {
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t half = ToBfloat16(row[i]);
      std::memcpy(to + 2 * i, &half, 2);
    }
  } else {
    const float divisor = scale == nullptr ? 1.0f : RowScale(row, count);
    if (scale != nullptr) *scale = divisor;
    for (int64_t i = 0; i < count; ++i) to[i] = ToFp8(row[i] / divisor);
  }
}

void StoreTokens(void* context, int64_t begin, int64_t end) {
  const auto& args = *static_cast<const StoreKvArgs*>(context);
  const int64_t size = KvBytes(args.format);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t block = args.slot_mapping[token] / args.block_size;
    const int64_t offset = args.slot_mapping[token] % args.block_size;
    for (int64_t head = 0; head < args.num_kv_heads; ++head) {
      const int64_t from = head * args.head_dim;
      const int64_t row = head * args.block_size + offset;
      const int64_t to = row * args.head_dim;
      const int64_t scale = block * args.num_kv_heads * args.block_size + row;
      StoreRow(args.format, args.k + token * args.k_stride + from, args.head_dim,
               args.k_cache + (block * args.k_block_stride + to) * size,
               args.k_scales == nullptr ? nullptr : args.k_scales + scale);
      StoreRow(args.format, args.v + token * args.v_stride + from, args.head_dim,
               args.v_cache + (block * args.v_block_stride + to) * size,
               args.v_scales == nullptr ? nullptr : args.v_scales + scale);
    }
  }
}

}  // namespace

void StoreKv(const StoreKvArgs& args) {
  // Padding tokens share slots, so tokens stay on one thread: two writers of one slot would race.
  StoreTokens(const_cast<StoreKvArgs*>(&args), 0, args.num_tokens);
}

void StoreLatent(const StoreLatentArgs& args) {
  const int64_t width = args.latent_dim + args.key_dim, size = KvBytes(args.format);
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t slot = args.slot_mapping[token];
    const int64_t at = slot / args.block_size * args.block_stride + slot % args.block_size * width;
    uint8_t* const row = args.cache + at * size;
    StoreRow(args.format, args.latent + token * args.latent_stride, args.latent_dim, row, nullptr);
    StoreRow(args.format, args.key + token * args.key_stride, args.key_dim,
             row + args.latent_dim * size, nullptr);
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

void MoveBlocks(uintptr_t caches, int64_t num_caches, uintptr_t packed, uintptr_t pairs,
                int64_t num_pairs, bool to_packed) {
  struct Cache {
    uintptr_t address;
    int64_t block_bytes;
  };
  const auto* cache = reinterpret_cast<const Cache*>(caches);
  const auto* pair = reinterpret_cast<const int32_t*>(pairs);
  int64_t row_bytes = 0;
  for (int64_t c = 0; c < num_caches; ++c) row_bytes += cache[c].block_bytes;
  for (int64_t i = 0; i < num_pairs; ++i) {
    auto* part = reinterpret_cast<uint8_t*>(packed) + pair[2 * i + 1] * row_bytes;
    for (int64_t c = 0; c < num_caches; ++c) {
      const int64_t size = cache[c].block_bytes;
      auto* block = reinterpret_cast<uint8_t*>(cache[c].address) + pair[2 * i] * size;
      std::memcpy(to_packed ? part : block, to_packed ? block : part, static_cast<size_t>(size));
      part += size;
    }
  }
}

}  // namespace tokenspeed::cpu
