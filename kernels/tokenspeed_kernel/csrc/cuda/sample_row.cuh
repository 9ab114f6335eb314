// SPDX-License-Identifier: MIT
//
// Pieces of sampling that work on one row of logits with one block: reading it, block-wide scans
// and sorts, and the noise. Device code for sample.cu alone.
//
// A token is ordered by how far it lies below the largest, far = (peak - logit) / temperature >= 0,
// the likeliest first: the bits of a float that is not negative order as the float does.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kThreads = 512;
constexpr int kItems = 2048;  // candidates of a row, and bins of a histogram
constexpr int kEach = kItems / kThreads;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kFarthest =
    0x7f7fffff;  // the largest finite float; what lies at infinity is out
constexpr float kInfinity = __builtin_huge_valf();

struct Shared {
  uint64_t items[kItems];  // far's bits over the token, or sums of a histogram
  uint32_t counts[kItems];
  uint64_t warps[kWarps];
  uint64_t found;
  uint32_t where;
  int count;
  float best;
};

struct Row {
  const float* logits;
  int vocab;
  float peak;
  float temperature;

  __device__ float Far(float logit) const { return (peak - logit) / temperature; }
};

__device__ inline float4 LoadAny(const Row& row, int group) {
  const int at = group * 4;
  float4 v;
  v.x = row.logits[at];
  v.y = at + 1 < row.vocab ? row.logits[at + 1] : -kInfinity;
  v.z = at + 2 < row.vocab ? row.logits[at + 2] : -kInfinity;
  v.w = at + 3 < row.vocab ? row.logits[at + 3] : -kInfinity;
  return v;
}

// Calls f(group, values) for every four neighbours; those past the end are -infinity.
template <typename F>
__device__ inline void ForEachFour(const Row& row, F f) {
  constexpr int kAhead = 4;
  const int groups = (row.vocab + 3) / 4;
  int group = threadIdx.x;
  if (reinterpret_cast<uintptr_t>(row.logits) % 16 == 0) {
    const float4* packs = reinterpret_cast<const float4*>(row.logits);
    const int whole = row.vocab / 4;
    for (; group + (kAhead - 1) * kThreads < whole; group += kAhead * kThreads) {
      float4 v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) v[i] = packs[group + i * kThreads];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) f(group + i * kThreads, v[i]);
    }
  }
  for (; group < groups; group += kThreads) f(group, LoadAny(row, group));
}

__device__ inline uint32_t Ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float FromOrdered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A value and the token that has it; the greater is the larger value, then the lower token.
__device__ inline uint64_t Scored(float value, uint32_t token) {
  return static_cast<uint64_t>(Ordered(value)) << 32 | static_cast<uint32_t>(~token);
}

__device__ inline uint64_t BlockMax(uint64_t value, Shared& s) {
  for (int lane = 16; lane > 0; lane >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, value, lane);
    value = other > value ? other : value;
  }
  if ((threadIdx.x & 31) == 0) s.warps[threadIdx.x >> 5] = value;
  __syncthreads();
  value = s.warps[threadIdx.x & (kWarps - 1)];
  for (int lane = kWarps / 2; lane > 0; lane >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, value, lane);
    value = other > value ? other : value;
  }
  __syncthreads();
  return value;
}

// The sum over the threads before this one; `total` is the sum over all. Added up in one order.
template <typename N>
__device__ inline N BlockScan(N value, N* total, Shared& s) {
  static_assert(sizeof(N) == sizeof(uint64_t), "shares the memory of s.warps");
  N* const sums = reinterpret_cast<N*>(s.warps);
  const int lane = threadIdx.x & 31;
  N through = value;
  for (int step = 1; step < 32; step <<= 1) {
    const N before = __shfl_up_sync(0xffffffffu, through, step);
    if (lane >= step) through += before;
  }
  if (lane == 31) sums[threadIdx.x >> 5] = through;
  __syncthreads();
  N before = 0, all = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == (threadIdx.x >> 5)) before = all;
    all += sums[warp];
  }
  __syncthreads();
  *total = all;
  // Of the lane before, not `through - value`: a difference would round.
  const N lanes_before = __shfl_up_sync(0xffffffffu, through, 1);
  return before + (lane == 0 ? N(0) : lanes_before);
}

// Ascending bitonic sort of the first `size` items, a power of two.
__device__ inline void Sort(Shared& s, int size) {
  for (int run = 2; run <= size; run <<= 1) {
    for (int step = run >> 1; step > 0; step >>= 1) {
      for (int pair = threadIdx.x; pair < size / 2; pair += kThreads) {
        const int low = 2 * pair - (pair & (step - 1));
        const uint64_t a = s.items[low], b = s.items[low + step];
        if ((a > b) == ((low & run) == 0)) {
          s.items[low] = b;
          s.items[low + step] = a;
        }
      }
      __syncthreads();
    }
  }
}

__device__ inline void PhiloxRound(uint32_t (&c)[4], uint32_t k0, uint32_t k1) {
  const uint32_t low0 = c[0] * 0xD2511F53u, high0 = __umulhi(c[0], 0xD2511F53u);
  const uint32_t low1 = c[2] * 0xCD9E8D57u, high1 = __umulhi(c[2], 0xCD9E8D57u);
  c[0] = high1 ^ c[1] ^ k0;
  c[1] = low1;
  c[2] = high0 ^ c[3] ^ k1;
  c[3] = low0;
}

// Words of the tokens 4 * group .. 4 * group + 3, as sampling/philox.py defines them.
__device__ inline void Philox(uint64_t seed, uint64_t position, uint32_t group,
                              uint32_t (&words)[4]) {
  words[0] = group;
  words[1] = static_cast<uint32_t>(position);
  words[2] = static_cast<uint32_t>(position >> 32);
  words[3] = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    PhiloxRound(words, k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

__device__ inline float Uniform(uint32_t word) {
  const float u = static_cast<float>(word >> 8) * 0x1p-24f + 0x1p-25f;
  return fminf(u, 1.0f - 0x1p-24f);
}

__device__ inline float Gumbel(float u) { return -logf(-logf(u)); }

// No less than Gumbel(u), for one fast logarithm: -log(u) is at least 1 - u.
__device__ inline float GumbelBound(float u) { return 1e-3f - __logf(1.0f - u); }

}  // namespace tokenspeed
