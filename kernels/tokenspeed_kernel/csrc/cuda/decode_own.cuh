// SPDX-License-Identifier: MIT
//
// One item of a decode's plan that is a row's own: one KV head and some of the row's keys.
//
// Each of the block's four warps takes sixteen keys at a time, straight into registers: keys times
// queries on the matrix units (K is permuted alike on both sides, so that a lane reads 16 bytes),
// values by multiply-add with four columns a lane. Loads of all keys and values of a step are in
// flight together; those of the first begin before the kernel ahead has ended, or come as far as
// the second-level cache where the newest key, which it may still write, is among them. The warps'
// sums meet in shared memory.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kDecodeHead = 128;
constexpr int kDecodeWarps = 4;
constexpr int kStepKeys = 16;
constexpr int kBlockKeys = kDecodeWarps * kStepKeys;
constexpr int kMostHeads = 8;

// A launch, as attention/cuda_paged.py describes it.
struct DecodeShape {
  int num_heads;
  int num_kv_heads;
  int block_size;
  int num_rows;
  float scale;  // with log2(e) in it
  int64_t q_stride;
  int64_t table_stride;
};

// Sums of some keys: of exp2(score - peak), alone and times the values.
struct DecodeShared {
  float weights[kDecodeWarps][kStepKeys][kMostHeads];
  float shrink[kDecodeWarps][kMostHeads];
  float peak[kDecodeWarps][kMostHeads];
  float total[kDecodeWarps][kMostHeads];
  float out[kDecodeWarps][kMostHeads][kDecodeHead];
};

__device__ inline void MultiplyKeys(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint4 Load16(const __nv_bfloat16* from) {
  return *reinterpret_cast<const uint4*>(from);
}

__device__ inline float OverKeys(float value, bool sum) {  // lanes of the same heads
#pragma unroll
  for (int lane = 4; lane < 32; lane <<= 1) {
    const float other = __shfl_xor_sync(0xffffffffu, value, lane);
    value = sum ? value + other : fmaxf(value, other);
  }
  return value;
}

// One row's keys [begin, end), of which the step itself wrote the one at `newest`.
struct Keys {
  int begin;
  int end;
  int newest;
};

// Sixteen keys and values of one head; a lane has pieces of two keys, and four columns of each
// value.
struct StepTile {
  uint4 low[4], high[4];
  uint2 value[kStepKeys];

  __device__ inline void Load(const __nv_bfloat16* k_cache, const __nv_bfloat16* v_cache,
                              int64_t at, int exist) {
    const int lane = threadIdx.x & 31;
    const __nv_bfloat16* k = k_cache + at + (lane >> 2) * kDecodeHead + (lane & 3) * 8;
    const __nv_bfloat16* v = v_cache + at + lane * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[i] = LoadStreamed16(k + i * 32);
      high[i] = LoadStreamed16(k + 8 * kDecodeHead + i * 32);
    }
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) {  // nothing times NaN is NaN, so what isn't there is zero
      value[i] = i < exist ? LoadStreamed8(v + i * kDecodeHead) : make_uint2(0, 0);
    }
  }

  // To the second-level cache: what is written meanwhile lies there too.
  static __device__ inline void Prefetch(const __nv_bfloat16* k_cache, const __nv_bfloat16* v_cache,
                                         int64_t at) {
    constexpr int kEach = kStepKeys * kDecodeHead / 32;
    const int64_t mine = at + (threadIdx.x & 31) * kEach;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(k_cache + mine));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(v_cache + mine));
  }
};

// The row's queries of this KV head; a lane has the pieces of one head that it multiplies.
__device__ inline void LoadQueries(uint4 (&query)[4], const __nv_bfloat16* q, int64_t row,
                                   int kv_head, const DecodeShape& shape) {
  const int lane = threadIdx.x & 31;
  const int group_size = shape.num_heads / shape.num_kv_heads;
  const __nv_bfloat16* mine = q + row * shape.q_stride +
                              (kv_head * group_size + (lane >> 2)) * kDecodeHead + (lane & 3) * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    query[i] = (lane >> 2) < group_size ? Load16(mine + i * 32) : make_uint4(0, 0, 0, 0);
  }
}

// One warp over its keys; leaves its sums in `s`.
template <int HEADS>
__device__ inline void WarpSums(const __nv_bfloat16* q, const __nv_bfloat16* k_cache,
                                const __nv_bfloat16* v_cache, const int* table, int64_t row,
                                const Keys& keys, int kv_head, const DecodeShape& shape,
                                DecodeShared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = lane >> 2, pair = lane & 3;
  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
  float out[HEADS][4] = {};
  int key = keys.begin + warp * kStepKeys;
  int block = key < keys.end ? __ldcg(table + key / shape.block_size) : 0;
  const auto place = [&] {
    return ((static_cast<int64_t>(block) * shape.num_kv_heads + kv_head) * shape.block_size +
            key % shape.block_size) *
           kDecodeHead;
  };
  StepTile tile;
  const bool early = key + kStepKeys <= min(keys.end, keys.newest);
  if (early) {
    tile.Load(k_cache, v_cache, place(), kStepKeys);
  } else if (key < keys.end) {
    StepTile::Prefetch(k_cache, v_cache, place());
  }
  LaunchDependents();  // whose first loads come after these
  WaitForPrevious();
  uint4 query[4];
  LoadQueries(query, q, row, kv_head, shape);
  if (!early && key < keys.end) tile.Load(k_cache, v_cache, place(), keys.end - key);
  while (key < keys.end) {
    const int next = key + kBlockKeys;
    if (next < keys.end) block = table[next / shape.block_size];

    float score[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      MultiplyKeys(score, tile.low[i].x, tile.high[i].x, tile.low[i].y, tile.high[i].y, query[i].x,
                   query[i].y);
      MultiplyKeys(score, tile.low[i].z, tile.high[i].z, tile.low[i].w, tile.high[i].w, query[i].z,
                   query[i].w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = key + group + (i >> 1) * 8 < keys.end;
      score[i] = exists ? score[i] * shape.scale : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = fmaxf(peak[i], OverKeys(fmaxf(score[i], score[i + 2]), false));
      const float base = most == -INFINITY ? 0.0f : most;
      const float shrink = FastExp2(peak[i] - base);
      score[i] = FastExp2(score[i] - base);
      score[i + 2] = FastExp2(score[i + 2] - base);
      total[i] = total[i] * shrink + score[i] + score[i + 2];
      peak[i] = most;
      if (group == 0) s.shrink[warp][pair * 2 + i] = shrink;
      s.weights[warp][group][pair * 2 + i] = score[i];
      s.weights[warp][group + 8][pair * 2 + i] = score[i + 2];
    }
    __syncwarp();
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
      const float shrink = s.shrink[warp][head];
#pragma unroll
      for (int i = 0; i < 4; ++i) out[head][i] *= shrink;
    }
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) {
      const __nv_bfloat162 left = *reinterpret_cast<const __nv_bfloat162*>(&tile.value[i].x);
      const __nv_bfloat162 right = *reinterpret_cast<const __nv_bfloat162*>(&tile.value[i].y);
      const float column[4] = {ToFloat(left.x), ToFloat(left.y), ToFloat(right.x),
                               ToFloat(right.y)};
#pragma unroll
      for (int head = 0; head < HEADS; ++head) {
        const float weight = s.weights[warp][i][head];
#pragma unroll
        for (int j = 0; j < 4; ++j) out[head][j] += weight * column[j];
      }
    }
    __syncwarp();
    key = next;
    if (key < keys.end) tile.Load(k_cache, v_cache, place(), keys.end - key);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = OverKeys(total[i], true);
    if (group == 0) {
      s.peak[warp][pair * 2 + i] = peak[i];
      s.total[warp][pair * 2 + i] = total[i];
    }
  }
#pragma unroll
  for (int head = 0; head < HEADS; ++head) {
    *reinterpret_cast<float4*>(&s.out[warp][head][lane * 4]) =
        make_float4(out[head][0], out[head][1], out[head][2], out[head][3]);
  }
}

}  // namespace tokenspeed
