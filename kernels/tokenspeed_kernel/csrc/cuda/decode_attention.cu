// SPDX-License-Identifier: MIT
//
// Attention of one query a row over paged keys and values, head size 128, up to eight query heads
// of a KV head.
//
// A block has one row, one KV head and one part of its keys; each of its four warps takes sixteen
// keys at a time, straight into registers: keys times queries on the matrix units (K is permuted
// alike on both sides, so that a lane reads 16 bytes), values by multiply-add with four columns a
// lane. The warps' sums meet in shared memory, the parts' in device memory, where the last block of
// a row and head to arrive adds them up in order and sets the counter back to zero. Loads of all
// keys and values of a step are in flight together. Launched by attention/cuda_paged.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kDecodeHead = 128;
constexpr int kDecodeWarps = 4;
constexpr int kStepKeys = 16;
constexpr int kBlockKeys = kDecodeWarps * kStepKeys;
constexpr int kMostHeads = 8;

struct DecodeShape {
  int num_heads;
  int num_kv_heads;
  int block_size;
  int num_parts;
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
  bool last;
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

// Keys [begin, end) of a part, which begins at a multiple of kBlockKeys; parts from num_live on
// have none.
struct Keys {
  int begin;
  int end;
  int num_live;
};

__device__ inline Keys PartOf(int kv_len, int part, int num_parts) {
  const int each = (kv_len + num_parts - 1) / num_parts;
  const int share = max((each + kBlockKeys - 1) / kBlockKeys, 1) * kBlockKeys;
  Keys keys;
  keys.begin = part * share;
  keys.end = min(keys.begin + share, kv_len);
  keys.num_live = max((kv_len + share - 1) / share, 1);
  return keys;
}

// One warp over its keys of the part; leaves its sums in `s`.
template <int HEADS>
__device__ inline void WarpSums(const uint4 (&query)[4], const __nv_bfloat16* k_cache,
                                const __nv_bfloat16* v_cache, const int* table, const Keys& keys,
                                int kv_head, const DecodeShape& shape, DecodeShared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = lane >> 2, pair = lane & 3;
  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
  float out[HEADS][4] = {};
  int key = keys.begin + warp * kStepKeys;
  int block = key < keys.end ? table[key / shape.block_size] : 0;
  for (; key < keys.end; key += kBlockKeys) {
    const int64_t at =
        ((static_cast<int64_t>(block) * shape.num_kv_heads + kv_head) * shape.block_size +
         key % shape.block_size) *
        kDecodeHead;
    const __nv_bfloat16* k = k_cache + at + group * kDecodeHead + pair * 8;
    const __nv_bfloat16* v = v_cache + at + lane * 4;
    uint4 low[4], high[4];
    uint2 value[kStepKeys];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[i] = LoadStreamed16(k + i * 32);
      high[i] = LoadStreamed16(k + 8 * kDecodeHead + i * 32);
    }
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) {  // nothing times NaN is NaN, so what isn't there is zero
      value[i] = key + i < keys.end ? LoadStreamed8(v + i * kDecodeHead) : make_uint2(0, 0);
    }
    const int next = key + kBlockKeys;
    if (next < keys.end) block = table[next / shape.block_size];

    float score[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      MultiplyKeys(score, low[i].x, high[i].x, low[i].y, high[i].y, query[i].x, query[i].y);
      MultiplyKeys(score, low[i].z, high[i].z, low[i].w, high[i].w, query[i].z, query[i].w);
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
      const __nv_bfloat162 left = *reinterpret_cast<const __nv_bfloat162*>(&value[i].x);
      const __nv_bfloat162 right = *reinterpret_cast<const __nv_bfloat162*>(&value[i].y);
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

// Adds up the parts of one head by one warp, in their order; there are at most 32.
__device__ inline void AddParts(const float* partial, const float2* stats, int num_parts,
                                __nv_bfloat16* out) {
  const int lane = threadIdx.x & 31;
  const float2 mine = lane < num_parts ? __ldcg(&stats[lane]) : make_float2(-INFINITY, 0.0f);
  float peak = mine.x;
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
  }
  const float share = mine.y > 0.0f ? FastExp2(mine.x - peak) : 0.0f;
  const float total = WarpSum(mine.y * share);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int i = 0; i < num_parts; ++i) {
    const float weight = __shfl_sync(0xffffffffu, share, i);
    const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + i * kDecodeHead) + lane);
    sum.x += weight * part.x;
    sum.y += weight * part.y;
    sum.z += weight * part.z;
    sum.w += weight * part.w;
  }
  const float scale = total > 0.0f ? 1.0f / total : 0.0f;
  const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum.x * scale, sum.y * scale),
                                   __floats2bfloat162_rn(sum.z * scale, sum.w * scale)};
  *reinterpret_cast<uint2*>(out + lane * 4) = *reinterpret_cast<const uint2*>(pairs);
}

template <int HEADS>
__device__ void DecodeAttention(const __nv_bfloat16* q, const __nv_bfloat16* k_cache,
                                const __nv_bfloat16* v_cache, const int* tables, const int* kv_lens,
                                __nv_bfloat16* out, float* partial, float2* stats, int* counters,
                                const DecodeShape& shape) {
  __shared__ DecodeShared s;
  const int part = blockIdx.x % shape.num_parts;
  const int pair = blockIdx.x / shape.num_parts;
  const int kv_head = pair % shape.num_kv_heads;
  const int64_t row = pair / shape.num_kv_heads;
  const int group_size = shape.num_heads / shape.num_kv_heads;
  const int lane = threadIdx.x & 31;
  LaunchDependents();
  WaitForPrevious();

  uint4 query[4];
  const __nv_bfloat16* mine = q + row * shape.q_stride +
                              (kv_head * group_size + (lane >> 2)) * kDecodeHead + (lane & 3) * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    query[i] = (lane >> 2) < group_size ? Load16(mine + i * 32) : make_uint4(0, 0, 0, 0);
  }
  const Keys keys = PartOf(kv_lens[row], part, shape.num_parts);
  if (part >= keys.num_live) return;
  WarpSums<HEADS>(query, k_cache, v_cache, tables + row * shape.table_stride, keys, kv_head, shape,
                  s);
  __syncthreads();

  const int64_t first_head = row * shape.num_heads + kv_head * group_size;
  const int column = threadIdx.x;
  for (int head = 0; head < group_size; ++head) {
    float peak = -INFINITY, total = 0.0f, sum = 0.0f;
    for (int warp = 0; warp < kDecodeWarps; ++warp) peak = fmaxf(peak, s.peak[warp][head]);
    for (int warp = 0; warp < kDecodeWarps && peak > -INFINITY; ++warp) {
      const float share = FastExp2(s.peak[warp][head] - peak);
      total += s.total[warp][head] * share;
      sum += s.out[warp][head][column] * share;
    }
    if (keys.num_live == 1) {
      const float share = total > 0.0f ? 1.0f / total : 0.0f;
      out[(first_head + head) * kDecodeHead + column] = FromFloat<__nv_bfloat16>(sum * share);
    } else {
      const int64_t place = (first_head + head) * shape.num_parts + part;
      partial[place * kDecodeHead + column] = sum;
      if (column == 0) stats[place] = make_float2(peak, total);
    }
  }
  if (keys.num_live == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) s.last = atomicAdd(&counters[pair], 1) == keys.num_live - 1;
  __syncthreads();
  if (!s.last) return;
  __threadfence();
  for (int head = threadIdx.x >> 5; head < group_size; head += kDecodeWarps) {
    const int64_t first = (first_head + head) * shape.num_parts;
    AddParts(partial + first * kDecodeHead, stats + first, keys.num_live,
             out + (first_head + head) * kDecodeHead);
  }
  if (threadIdx.x == 0) counters[pair] = 0;
}

}  // namespace tokenspeed

#define TOKENSPEED_DECODE_ATTENTION(HEADS)                                                        \
  extern "C" __global__ void __launch_bounds__(128, 4) decode_attention_bf16_##HEADS(             \
      const __nv_bfloat16* q, const __nv_bfloat16* k_cache, const __nv_bfloat16* v_cache,         \
      const int* tables, const int* kv_lens, __nv_bfloat16* out, float* partial, float2* stats,   \
      int* counters, const tokenspeed::DecodeShape shape) {                                       \
    tokenspeed::DecodeAttention<HEADS>(q, k_cache, v_cache, tables, kv_lens, out, partial, stats, \
                                       counters, shape);                                          \
  }

TOKENSPEED_DECODE_ATTENTION(2)
TOKENSPEED_DECODE_ATTENTION(4)
TOKENSPEED_DECODE_ATTENTION(8)
