// SPDX-License-Identifier: MIT
//
// Multi-head latent attention over a paged cache of 512 + 64 numbers a token, for Hopper: all heads
// read the same keys, whose first 512 columns are the values.
//
// A block has 64 queries, heads of one token or of a few tokens of a row, and some of the row's
// keys; decode_plan.cu and prefill_plan.cu say which. One warp copies 64 keys at a time, one tile
// ahead. Each of two warpgroups has half of a tile's keys for the scores and half of the columns
// for the sums: they exchange the largest scores and the weights (as FlashMLA, DeepSeek 2025,
// splits the work). The next scores are multiplied before the last sums, so a softmax runs under
// the sums. Sums are brought down to a new largest score only when it has grown by much. Launched
// by attention/cuda_mla.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/decode_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/prefill_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/softmax.cuh"

namespace tokenspeed {

constexpr int kLatent = 512;
constexpr int kPanels = 9;  // 64 columns each; the last holds the rotated part
constexpr int kLatentQueries = 64;
constexpr int kLatentPanelBytes = 64 * 128;
constexpr int kLatentTileBytes = kPanels * kLatentPanelBytes;
constexpr int kLatentStages = 2;

struct LatentShape {
  int num_heads;
  int heads_per_tile;
  int tokens_per_tile;
  int block_size;
  int num_rows;  // of a decode's plan
  float scale;   // with log2(e) in it
  int64_t table_stride;
};

struct LatentCall {
  int* plan;
  const int* tables;
  const int* query_start;
  const int* kv_lens;
  __nv_bfloat16* out;  // [tokens, heads, 512]
  float* partial;      // [parts, heads, 512]
  float2* stats;       // [parts, heads]
  int* counters;       // of rows and tiles of heads
};

struct alignas(1024) LatentShared {
  uint8_t q[kLatentTileBytes];
  uint8_t k[kLatentStages][kLatentTileBytes];
  uint4 weights[2][2][128];  // of a warpgroup's keys, sixteen at a time, as threads multiply them
  float peaks[2][kLatentQueries];
  float totals[2][kLatentQueries];
  uint64_t q_full, k_full[kLatentStages], k_empty[kLatentStages];
  uint64_t tail;  // a tile that is not all there has arrived
  int last;
};

struct LatentJob {
  int row;
  int token;    // the first, among all
  int visible;  // keys that the first token sees
  int left;     // tokens of the row from the first on
  int begin;
  int end;
  int part;
  int parts;
  int old;  // keys that were there before the step
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <bool DECODE>
__device__ inline bool FindJob(const LatentCall& call, const LatentShape& shape, int index,
                               LatentJob* job) {
  if (index >= __ldcg(call.plan)) return false;
  if (DECODE) {
    const DecodePlan plan(call.plan, shape.num_rows);
    const int4 item = __ldcg(plan.items + index);
    job->row = job->token = item.x;
    job->visible = __ldcg(call.kv_lens + item.x);
    job->left = 1;
    job->begin = item.y;
    job->end = item.z;
    job->part = item.w;
    job->parts = __ldcg(plan.parts + item.x);
    job->old = job->visible - 1;
  } else {
    const PrefillJob planned = reinterpret_cast<const PrefillJob*>(call.plan + 4)[index];
    const int start = call.query_start[planned.row];
    const int queries = call.query_start[planned.row + 1] - start;
    const int kv_len = call.kv_lens[planned.row];
    job->row = planned.row;
    job->token = start + planned.skipped;
    job->visible = kv_len - queries + planned.skipped + 1;
    job->left = queries - planned.skipped;
    job->begin = 0;
    job->end = min(job->visible - 1 + shape.tokens_per_tile, kv_len);
    job->part = 0;
    job->parts = 1;
    job->old = 0;
  }
  return true;
}

__device__ inline void CopyLatents(uint8_t* to, const CUtensorMap* map, uint64_t* full,
                                   const int* table, int first, int end, int block_size) {
  const int lane = threadIdx.x & 31;
  const int box = min(block_size, kKeyTile);
  const int boxes = (min(kKeyTile, end - first) + box - 1) / box;
  if (lane == 0) hopper::ArriveExpecting(full, boxes * box * kPanels * 128);
  __syncwarp();
  for (int i = lane; i < boxes * kPanels; i += 32) {
    const int at = first + i % boxes * box, panel = i / boxes;
    const int row = table[at / block_size] * block_size + at % block_size;
    hopper::CopyBox(to + panel * kLatentPanelBytes + i % boxes * box * 128, map, panel * 64, row,
                    full);
  }
}

// What is past the last key weighs nothing, but nothing times NaN is NaN.
__device__ inline void ZeroRows(uint8_t* tile, int exists) {
  for (int i = exists * 8 + (threadIdx.x & 31); i < kKeyTile * 8; i += 32) {
    for (int panel = 0; panel < kPanels; ++panel) {
      *reinterpret_cast<uint4*>(tile + panel * kLatentPanelBytes + i * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  hopper::FenceShared();
  __syncwarp();
}

__device__ inline void ProduceLatents(const CUtensorMap* q_map, const CUtensorMap* k_map,
                                      const LatentCall& call, const LatentShape& shape,
                                      const LatentJob& job, int first_head, LatentShared& s) {
  const int* table = call.tables + job.row * shape.table_stride;
  const auto copy = [&](int i) {
    const int stage = i % kLatentStages, first = job.begin + i * kKeyTile;
    if (first + kKeyTile <= job.end) {
      CopyLatents(s.k[stage], k_map, &s.k_full[stage], table, first, job.end, shape.block_size);
      return;
    }
    CopyLatents(s.k[stage], k_map, &s.tail, table, first, job.end, shape.block_size);
    hopper::Wait(&s.tail, 0);
    ZeroRows(s.k[stage], job.end - first);
    if ((threadIdx.x & 31) == 0) hopper::Arrive(&s.k_full[stage]);
  };
  const int tiles = (job.end - job.begin + kKeyTile - 1) / kKeyTile;
  // The kernel ahead may still write what is not older than the step.
  const int early = job.begin + kKeyTile <= min(job.old, job.end) ? 1 : 0;
  if (early) copy(0);
  WaitForPrevious();
  if ((threadIdx.x & 31) == 0) {
    hopper::ArriveExpecting(&s.q_full,
                            shape.heads_per_tile * shape.tokens_per_tile * kPanels * 128);
    for (int panel = 0; panel < kPanels; ++panel) {
      hopper::CopyBox(s.q + panel * kLatentPanelBytes, q_map, panel * 64, first_head, job.token,
                      &s.q_full);
    }
  }
  for (int i = early; i < tiles; ++i) {
    if (i >= kLatentStages) {
      hopper::Wait(&s.k_empty[i % kLatentStages], (i / kLatentStages & 1) ^ 1);
    }
    copy(i);
  }
}

// Scores of 64 queries and the warpgroup's 32 keys of a tile.
__device__ inline void StartScores(float (&scores)[16], const uint8_t* q, const uint8_t* k) {
  const uint64_t queries = hopper::Operand(q, 16, 1024), keys = hopper::Operand(k, 16, 1024);
#pragma unroll 1  // operands of all panels would not fit in the registers
  for (int panel = 0; panel < kPanels; ++panel) {
    hopper::BeginProducts();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int at = panel * kLatentPanelBytes + step * 32;
      hopper::MultiplyShared(scores, hopper::Advance(queries, at), hopper::Advance(keys, at),
                             panel + step > 0);
    }
  }
  hopper::CommitProducts();
}

// The sums of the warpgroup's 256 columns: its own 32 keys, then the other's.
__device__ inline void StartSums(float (&out)[128], const uint32_t (&weights)[4][4],
                                 const uint8_t* v, int group) {
  const uint64_t values =
      hopper::Operand(v + group * 4 * kLatentPanelBytes, kLatentPanelBytes, 1024);
  const uint64_t mine = hopper::Advance(values, group * 4096);
  const uint64_t other = hopper::Advance(values, (group ^ 1) * 4096);
  hopper::BeginProducts();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    hopper::MultiplyRegisters(out, weights[step],
                              hopper::Advance(step < 2 ? mine : other, step % 2 * 2048), 1);
  }
  hopper::CommitProducts();
}

struct LatentSoftmax {
  float base[2] = {-INFINITY, -INFINITY};  // what scores are compared with, without the scale
  float total[2] = {0.0f, 0.0f};           // of this thread's keys
};

__device__ inline int FirstQuery() { return (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4; }

// Leaves the weights of the warpgroup's 32 keys for both.
__device__ inline void ExchangeWeights(float (&scores)[16], LatentSoftmax& state, float scale,
                                       int group, float (&shrink)[2], LatentShared& s) {
  const int thread = threadIdx.x & 127;
  float peak[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 16; ++i) peak[i >> 1 & 1] = fmaxf(peak[i >> 1 & 1], scores[i]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    peak[half] = fmaxf(peak[half], __shfl_xor_sync(0xffffffffu, peak[half], 1));
    peak[half] = fmaxf(peak[half], __shfl_xor_sync(0xffffffffu, peak[half], 2));
    if ((thread & 3) == 0) s.peaks[group][FirstQuery() + half * 8] = peak[half];
  }
  hopper::Sync<1, 256>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    peak[half] = fmaxf(peak[half], s.peaks[group ^ 1][FirstQuery() + half * 8]);
    shrink[half] = 1.0f;
    if ((peak[half] - state.base[half]) * scale > kLeastGrowth) {
      shrink[half] = FastExp2((state.base[half] - peak[half]) * scale);
      state.base[half] = peak[half];
    }
    state.total[half] *= shrink[half];
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int half = i >> 1 & 1;
    scores[i] = FastExp2(fmaf(scores[i], scale, -state.base[half] * scale));
    state.total[half] += scores[i];
  }
  uint32_t pairs[2][4];
  Round(scores, pairs);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.weights[group][i][thread] = make_uint4(pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]);
  }
  hopper::Sync<2, 256>();
}

// What a product takes may not be made while another runs, so both halves are read when none does.
__device__ inline void ReadWeights(uint32_t (&weights)[4][4], int group, const LatentShared& s) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 four = s.weights[i < 2 ? group : group ^ 1][i % 2][threadIdx.x & 127];
    weights[i][0] = four.x;
    weights[i][1] = four.y;
    weights[i][2] = four.z;
    weights[i][3] = four.w;
  }
}

__device__ inline void HideKeys(float (&scores)[16], const int (&ends)[2], int first_key) {
  const int column = first_key + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (column + i / 4 * 8 + (i & 1) >= ends[i >> 1 & 1]) scores[i] = -INFINITY;
  }
}

__device__ inline void ShrinkSums(float (&out)[128], const float (&shrink)[2]) {
  if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i] *= shrink[i >> 1 & 1];
}

// Adds up the parts of one head by one warp, in their order.
__device__ inline void AddLatentParts(const LatentCall& call, int64_t first, int num_parts,
                                      int num_heads, __nv_bfloat16* out) {
  const int lane = threadIdx.x & 31;
  float peak = -INFINITY, total = 0.0f;
  for (int i = lane; i < num_parts; i += 32) {
    peak = fmaxf(peak, __ldcg(&call.stats[first + i * num_heads]).x);
  }
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
  }
  float4 sum[4] = {};
  for (int i = 0; i < num_parts; ++i) {
    const int64_t place = first + static_cast<int64_t>(i) * num_heads;
    const float2 stats = __ldcg(&call.stats[place]);
    const float share = FastExp2(stats.x - peak);
    total += stats.y * share;
    const auto* part = reinterpret_cast<const float4*>(call.partial + place * kLatent) + lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 value = __ldcg(part + j * 32);
      sum[j].x += share * value.x;
      sum[j].y += share * value.y;
      sum[j].z += share * value.z;
      sum[j].w += share * value.w;
    }
  }
  const float scale = 1.0f / total;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum[j].x * scale, sum[j].y * scale),
                                     __floats2bfloat162_rn(sum[j].z * scale, sum[j].w * scale)};
    *reinterpret_cast<uint2*>(out + j * 128 + lane * 4) = *reinterpret_cast<const uint2*>(pairs);
  }
}

// Writes the warpgroup's columns: the result, or the part of it.
__device__ inline void StoreSums(const float (&out)[128], const LatentSoftmax& state,
                                 const LatentCall& call, const LatentShape& shape,
                                 const LatentJob& job, int first_head, int group, int base,
                                 LatentShared& s) {
  float total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] = WholeTotal(state.total[half]);
    if ((threadIdx.x & 3) == 0) s.totals[group][FirstQuery() + half * 8] = total[half];
  }
  hopper::Sync<1, 256>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = FirstQuery() + half * 8;
    const int token = query / shape.heads_per_tile;
    const int head = first_head + query % shape.heads_per_tile;
    if (token >= min(shape.tokens_per_tile, job.left) || head >= shape.num_heads) continue;
    total[half] += s.totals[group ^ 1][query];
    const int column = group * 256 + (threadIdx.x & 3) * 2;
    if (job.parts == 1) {
      const float share = 1.0f / total[half];
      __nv_bfloat16* to =
          call.out + (static_cast<int64_t>(job.token + token) * shape.num_heads + head) * kLatent +
          column;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        *reinterpret_cast<__nv_bfloat162*>(to + i * 8) =
            __floats2bfloat162_rn(out[i * 4 + half * 2] * share, out[i * 4 + half * 2 + 1] * share);
      }
      continue;
    }
    const int64_t place = static_cast<int64_t>(base + job.part) * shape.num_heads + head;
    float* to = call.partial + place * kLatent + column;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      *reinterpret_cast<float2*>(to + i * 8) =
          make_float2(out[i * 4 + half * 2], out[i * 4 + half * 2 + 1]);
    }
    if (group == 0 && (threadIdx.x & 3) == 0) {
      call.stats[place] = make_float2(state.base[half] * shape.scale, total[half]);
    }
  }
}

// The block of a row and tile of heads that comes last adds up the parts.
__device__ inline void FinishRow(const LatentCall& call, const LatentShape& shape,
                                 const LatentJob& job, int first_head, int base, LatentShared& s) {
  __threadfence();
  hopper::Sync<1, 256>();
  if (threadIdx.x == 128) {
    const int tiles = (shape.num_heads + shape.heads_per_tile - 1) / shape.heads_per_tile;
    int* counter = &call.counters[job.row * tiles + first_head / shape.heads_per_tile];
    s.last = atomicAdd(counter, 1) == job.parts - 1;
    if (s.last) *counter = 0;
  }
  hopper::Sync<1, 256>();
  if (!s.last) return;
  __threadfence();
  const int heads = min(shape.heads_per_tile, shape.num_heads - first_head);
  for (int i = threadIdx.x / 32 - 4; i < heads; i += 8) {
    const int head = first_head + i;
    AddLatentParts(call, static_cast<int64_t>(base) * shape.num_heads + head, job.parts,
                   shape.num_heads,
                   call.out + (static_cast<int64_t>(job.token) * shape.num_heads + head) * kLatent);
  }
}

__device__ inline void ConsumeLatents(const LatentCall& call, const LatentShape& shape,
                                      const LatentJob& job, int first_head, int base,
                                      LatentShared& s) {
  const int group = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  int ends[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ends[half] = min(job.visible + (FirstQuery() + half * 8) / shape.heads_per_tile, job.end);
  }
  const int tiles = (job.end - job.begin + kKeyTile - 1) / kKeyTile;
  const int seen_by_all = min(job.visible, job.end);
  const auto hide = [&](float (&scores)[16], int i) {
    const int first = job.begin + i * kKeyTile;
    if (first + kKeyTile > seen_by_all) HideKeys(scores, ends, first + group * 32);
  };
  float scores[16], out[128], shrink[2];
  uint32_t weights[4][4];
  LatentSoftmax state;
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i] = 0.0f;
  hopper::Wait(&s.q_full, 0);
  hopper::Wait(&s.k_full[0], 0);
  StartScores(scores, s.q, s.k[0] + group * 4096);
  hopper::WaitProducts<0>();
  hopper::Pin(scores);
  hide(scores, 0);
  ExchangeWeights(scores, state, shape.scale, group, shrink, s);
  ReadWeights(weights, group, s);
  for (int i = 0; i + 1 < tiles; ++i) {
    const int stage = i % kLatentStages, next = (i + 1) % kLatentStages;
    hopper::Wait(&s.k_full[next], (i + 1) / kLatentStages & 1);
    StartScores(scores, s.q, s.k[next] + group * 4096);
    StartSums(out, weights, s.k[stage], group);
    hopper::WaitProducts<1>();
    hopper::Pin(scores);
    hide(scores, i + 1);
    ExchangeWeights(scores, state, shape.scale, group, shrink, s);
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    if (lane == 0) hopper::Arrive(&s.k_empty[stage]);
    ShrinkSums(out, shrink);
    ReadWeights(weights, group, s);
  }
  StartSums(out, weights, s.k[(tiles - 1) % kLatentStages], group);
  hopper::WaitProducts<0>();
  hopper::Pin(out);
  StoreSums(out, state, call, shape, job, first_head, group, base, s);
  if (job.parts > 1) FinishRow(call, shape, job, first_head, base, s);
}

#endif  // sm_90a

template <bool DECODE>
__device__ inline void LatentAttention(const CUtensorMap* q_map, const CUtensorMap* k_map,
                                       const LatentCall& call, const LatentShape& shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t memory[];
  auto& s =
      *reinterpret_cast<LatentShared*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  const int head_tiles = (shape.num_heads + shape.heads_per_tile - 1) / shape.heads_per_tile;
  const int first_head = blockIdx.x % head_tiles * shape.heads_per_tile;
  LaunchDependents();
  LatentJob job;
  if (!FindJob<DECODE>(call, shape, blockIdx.x / head_tiles, &job)) return WaitForPrevious();
  if (threadIdx.x == 0) {
    hopper::InitBarrier(&s.q_full, 1);
    hopper::InitBarrier(&s.tail, 1);
    for (int i = 0; i < kLatentStages; ++i) {
      hopper::InitBarrier(&s.k_full[i], 1);
      hopper::InitBarrier(&s.k_empty[i], 8);
    }
    hopper::FenceShared();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<40>();
    if (threadIdx.x < 32) ProduceLatents(q_map, k_map, call, shape, job, first_head, s);
  } else {
    hopper::TakeRegisters<232>();
    const int base = DECODE ? DecodePlan(call.plan, shape.num_rows).base[job.row] : 0;
    ConsumeLatents(call, shape, job, first_head, base, s);
  }
#endif
}

}  // namespace tokenspeed

#define TOKENSPEED_LATENT_ATTENTION(NAME, DECODE)                                                \
  extern "C" __global__ void __launch_bounds__(384, 1)                                           \
      NAME(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map, \
           int* plan, const int* tables, const int* query_start, const int* kv_lens,             \
           __nv_bfloat16* out, float* partial, float2* stats, int* counters,                     \
           const tokenspeed::LatentShape shape) {                                                \
    const tokenspeed::LatentCall call = {plan, tables,  query_start, kv_lens,                    \
                                         out,  partial, stats,       counters};                  \
    tokenspeed::LatentAttention<DECODE>(&q_map, &k_map, call, shape);                            \
  }

TOKENSPEED_LATENT_ATTENTION(latent_decode_bf16, true)
TOKENSPEED_LATENT_ATTENTION(latent_prefill_bf16, false)
