// SPDX-License-Identifier: MIT
//
// Attention of one query a row over paged keys and values, head size 128, up to eight query heads
// of a KV head, as decode_plan.cu planned it.
//
// A block has one item of the plan and one KV head: a part of one row's own keys (decode_own.cuh)
// or of the keys that a group of rows shares (decode_shared.cuh). A row that comes in one part is
// written at once. The parts of others meet in device memory, where the last block of a row and
// head to arrive adds them up in order and sets the counter back to zero. Plan, tables and lengths
// are older than the kernel ahead and read before it has ended. Launched by
// attention/cuda_paged.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/decode_shared.cuh"

namespace tokenspeed {

struct alignas(1024) DecodeBlock {
  union Work {
    GroupShared group;
    DecodeShared own;
  } work;
  uint64_t full[kGroupStages];
  int last[kTileQueries];  // of a group's rows: whether this block came last
};

struct DecodeCall {
  const __nv_bfloat16* q;
  const __nv_bfloat16* k_cache;
  const __nv_bfloat16* v_cache;
  const int* tables;
  const int* kv_lens;
  __nv_bfloat16* out;  // [rows, heads, 128]
  float* partial;      // [parts, heads, 128]
  float2* stats;       // [parts, heads]: the peak, and the sum of what exceeds it
  int* counters;       // [rows, KV heads]
};

// Adds up the parts of one head by one warp, in their order. `stride` heads lie between two parts.
__device__ inline void AddParts(const float* partial, const float2* stats, int num_parts,
                                int stride, __nv_bfloat16* out) {
  const int lane = threadIdx.x & 31;
  float peak = -INFINITY;
  for (int i = lane; i < num_parts; i += 32) peak = fmaxf(peak, __ldcg(&stats[i * stride]).x);
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
  }
  float total = 0.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < num_parts; first += 32) {
    const int live = min(num_parts - first, 32);
    float share = 0.0f;
    if (lane < live) {
      const float2 mine = __ldcg(&stats[(first + lane) * stride]);
      share = mine.y > 0.0f ? FastExp2(mine.x - peak) : 0.0f;
      total += mine.y * share;
    }
#pragma unroll 8
    for (int i = 0; i < live; ++i) {
      const float weight = __shfl_sync(0xffffffffu, share, i);
      const int64_t place = static_cast<int64_t>(first + i) * stride * kDecodeHead;
      const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + place) + lane);
      sum.x += weight * part.x;
      sum.y += weight * part.y;
      sum.z += weight * part.z;
      sum.w += weight * part.w;
    }
  }
  total = WarpSum(total);
  const float scale = total > 0.0f ? 1.0f / total : 0.0f;
  const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum.x * scale, sum.y * scale),
                                   __floats2bfloat162_rn(sum.z * scale, sum.w * scale)};
  *reinterpret_cast<uint2*>(out + lane * 4) = *reinterpret_cast<const uint2*>(pairs);
}

// A part of a row and KV head, of `parts`; the first of the row is the launch's part `base`.
struct Part {
  int64_t row;
  int kv_head;
  int index;
  int parts;
  int base;
};

// Counts the part as done, by one thread; whether it was the last.
__device__ inline bool CountPart(const DecodeCall& call, const Part& part,
                                 const DecodeShape& shape) {
  int* counter = &call.counters[part.row * shape.num_kv_heads + part.kv_head];
  const bool last = atomicAdd(counter, 1) == part.parts - 1;
  if (last) *counter = 0;
  return last;
}

// All heads of a row and KV head, whose parts are all there.
__device__ inline void AddRow(const DecodeCall& call, const Part& part, const DecodeShape& shape) {
  const int group_size = shape.num_heads / shape.num_kv_heads;
  for (int i = threadIdx.x >> 5; i < group_size; i += kDecodeWarps) {
    const int head = part.kv_head * group_size + i;
    const int64_t first = static_cast<int64_t>(part.base) * shape.num_heads + head;
    AddParts(call.partial + first * kDecodeHead, call.stats + first, part.parts, shape.num_heads,
             call.out + (part.row * shape.num_heads + head) * kDecodeHead);
  }
}

template <int HEADS>
__device__ inline void OwnPart(const DecodeCall& call, const Part& part, const Keys& keys,
                               const DecodeShape& shape, DecodeShared& s, int& last) {
  const int group_size = shape.num_heads / shape.num_kv_heads;
  WarpSums<HEADS>(call.q, call.k_cache, call.v_cache, call.tables + part.row * shape.table_stride,
                  part.row, keys, part.kv_head, shape, s);
  __syncthreads();
  const int column = threadIdx.x;
  for (int i = 0; i < group_size; ++i) {
    float peak = -INFINITY, total = 0.0f, sum = 0.0f;
    for (int warp = 0; warp < kDecodeWarps; ++warp) peak = fmaxf(peak, s.peak[warp][i]);
    for (int warp = 0; warp < kDecodeWarps && peak > -INFINITY; ++warp) {
      const float share = FastExp2(s.peak[warp][i] - peak);
      total += s.total[warp][i] * share;
      sum += s.out[warp][i][column] * share;
    }
    const int head = part.kv_head * group_size + i;
    if (part.parts == 1) {
      const float share = total > 0.0f ? 1.0f / total : 0.0f;
      call.out[(part.row * shape.num_heads + head) * kDecodeHead + column] =
          FromFloat<__nv_bfloat16>(sum * share);
    } else {
      const int64_t place = static_cast<int64_t>(part.base + part.index) * shape.num_heads + head;
      call.partial[place * kDecodeHead + column] = sum;
      if (column == 0) call.stats[place] = make_float2(peak, total);
    }
  }
  if (part.parts == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = CountPart(call, part, shape);
  __syncthreads();
  if (!last) return;
  __threadfence();
  AddRow(call, part, shape);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Writes half the columns of the group's sums as a part of each of its rows.
__device__ inline void StoreGroup(const float (&out)[32], const Softmax& state, int columns,
                                  const DecodeCall& call, const DecodePlan& plan,
                                  const GroupItem& item, int kv_head, const DecodeShape& shape) {
  const int heads = shape.num_heads / shape.num_kv_heads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = WholeTotal(state.total[half]);
    const int query = (threadIdx.x >> 5) * 16 + (threadIdx.x & 31) / 4 + half * 8;
    if (query >= item.num_members * heads) continue;
    const int row = item.members[query / heads];
    const int64_t place = static_cast<int64_t>(plan.base[row] + item.part) * shape.num_heads +
                          kv_head * heads + query % heads;
    float* to = call.partial + place * kDecodeHead + columns + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      *reinterpret_cast<float2*>(to + i * 8) =
          make_float2(out[i * 4 + half * 2], out[i * 4 + half * 2 + 1]);
    }
    if (columns == 0 && (threadIdx.x & 3) == 0) {
      call.stats[place] = make_float2(state.peak[half] * shape.scale, total);
    }
  }
}

__device__ inline void GroupPart(const CUtensorMap* k_map, const CUtensorMap* v_map,
                                 const DecodeCall& call, const DecodePlan& plan, const int4& item,
                                 int kv_head, const DecodeShape& shape, DecodeBlock& block) {
  const GroupItem mine = {plan.members - 1 - item.x, item.w >> 8, item.y, item.z, item.w & 255};
  const int* table = call.tables + mine.members[0] * shape.table_stride;
  const GroupCopies copies = {k_map,
                              v_map,
                              table,
                              mine.begin,
                              (mine.end - mine.begin) / kGroupKeys,
                              kv_head,
                              shape.num_kv_heads,
                              shape.block_size};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroupStages; ++i) hopper::InitBarrier(&block.full[i], 1);
    hopper::FenceShared();
    for (int i = 0; i < kGroupStages; ++i) copies.Bring(i, block.work.group, block.full);
  }
  __syncthreads();
  WaitForPrevious();
  uint32_t query[8][4];
  LoadGroup(query, call.q, mine, kv_head, shape);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float out[32];
    Softmax state;
    GroupSums(copies, query, half, shape.scale, block.work.group, block.full, out, state);
    StoreGroup(out, state, half * 64, call, plan, mine, kv_head, shape);
  }
  __threadfence();
  __syncthreads();
  const auto part_of = [&](int member) {
    const int64_t row = mine.members[member];
    return Part{row, kv_head, mine.part, plan.parts[row], plan.base[row]};
  };
  if (threadIdx.x < mine.num_members) {
    block.last[threadIdx.x] = CountPart(call, part_of(threadIdx.x), shape);
  }
  __syncthreads();
  for (int i = 0; i < mine.num_members; ++i) {
    if (!block.last[i]) continue;
    __threadfence();
    AddRow(call, part_of(i), shape);
  }
}

#endif  // sm_90a

template <int HEADS>
__device__ inline void DecodeAttention(const CUtensorMap* k_map, const CUtensorMap* v_map,
                                       const DecodeCall& call, int* memory,
                                       const DecodeShape& shape) {
  __shared__ DecodeBlock block;
  const DecodePlan plan(memory, shape.num_rows);
  LaunchDependents();
  const int kv_head = blockIdx.x % shape.num_kv_heads;
  const int index = blockIdx.x / shape.num_kv_heads;
  if (index >= __ldcg(plan.count)) return WaitForPrevious();
  const int4 item = __ldcg(plan.items + index);
  if (item.x >= 0) {
    const int64_t row = item.x;
    const Part part = {row, kv_head, item.w, plan.parts[row], plan.base[row]};
    const Keys keys = {item.y, item.z, __ldcg(call.kv_lens + row) - 1};
    OwnPart<HEADS>(call, part, keys, shape, block.work.own, block.last[0]);
  } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    GroupPart(k_map, v_map, call, plan, item, kv_head, shape, block);
#endif
  }
}

// Few rows, which no plan is made for: each comes in as many parts as blocks are left for it. Their
// lengths and tables, too, and all keys but the newest are older than the step's first layer
// (vector.cuh says why that is enough).
template <int HEADS>
__device__ inline void DecodeFew(const DecodeCall& call, const DecodeShape& shape) {
  __shared__ DecodeShared s;
  __shared__ int last;
  const int most_parts = gridDim.x / (shape.num_kv_heads * shape.num_rows);
  const int index = blockIdx.x % most_parts, pair = blockIdx.x / most_parts;
  const int64_t row = pair / shape.num_kv_heads;
  const int kv_len = __ldcg(call.kv_lens + row);
  const int each = (kv_len + most_parts - 1) / most_parts;
  const int share = (each + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  const Keys keys = {index * share, min(index * share + share, kv_len), kv_len - 1};
  const Part part = {row, pair % shape.num_kv_heads, index, (kv_len + share - 1) / share,
                     static_cast<int>(row) * most_parts};
  if (index >= part.parts) return WaitForPrevious();
  OwnPart<HEADS>(call, part, keys, shape, s, last);
}

}  // namespace tokenspeed

#define TOKENSPEED_DECODE_ATTENTION(HEADS)                                                      \
  extern "C" __global__ void __launch_bounds__(128, 4) decode_attention_bf16_##HEADS(           \
      const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,     \
      const __nv_bfloat16* q, const __nv_bfloat16* k_cache, const __nv_bfloat16* v_cache,       \
      const int* tables, const int* kv_lens, __nv_bfloat16* out, float* partial, float2* stats, \
      int* counters, int* plan, const tokenspeed::DecodeShape shape) {                          \
    const tokenspeed::DecodeCall call = {q,   k_cache, v_cache, tables,  kv_lens,               \
                                         out, partial, stats,   counters};                      \
    tokenspeed::DecodeAttention<HEADS>(&k_map, &v_map, call, plan, shape);                      \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(128, 4) decode_few_bf16_##HEADS(                 \
      const __nv_bfloat16* q, const __nv_bfloat16* k_cache, const __nv_bfloat16* v_cache,       \
      const int* tables, const int* kv_lens, __nv_bfloat16* out, float* partial, float2* stats, \
      int* counters, const tokenspeed::DecodeShape shape) {                                     \
    const tokenspeed::DecodeCall call = {q,   k_cache, v_cache, tables,  kv_lens,               \
                                         out, partial, stats,   counters};                      \
    tokenspeed::DecodeFew<HEADS>(call, shape);                                                  \
  }

TOKENSPEED_DECODE_ATTENTION(2)
TOKENSPEED_DECODE_ATTENTION(4)
TOKENSPEED_DECODE_ATTENTION(8)
