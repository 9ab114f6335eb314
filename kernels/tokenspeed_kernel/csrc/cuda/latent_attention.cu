// SPDX-License-Identifier: MIT
//
// Multi-head latent attention over a paged cache of 512 + 64 numbers a token, for Hopper: all heads
// read the same keys, whose first 512 columns are the values.
//
// A block has 64 queries, heads of one token or of a few tokens of a row, and some of the row's
// keys; decode_plan.cu and prefill_plan.cu say which, latent_copy.cuh brings them into two stages.
// Of the first stage's keys the first warpgroup makes scores and weights, of the second's the
// second, and each sums half of the columns over both (as FlashMLA, DeepSeek 2025, splits the
// work): one has products to run while the other is at its softmax. They hand over the weights and
// what scores are compared with. Sums are brought down to a new largest score only when it has
// grown by much. Launched by attention/cuda_mla.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/latent_copy.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/latent_parts.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/softmax.cuh"

namespace tokenspeed {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Scores of 64 queries and a tile's keys, as their parts arrive.
__device__ inline void StartScores(float (&scores)[32], LatentShared& s, int stage,
                                   uint32_t parity) {
  const uint64_t queries = hopper::Operand(s.q, 16, 1024);
  const uint64_t keys = hopper::Operand(s.k[stage], 16, 1024);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    hopper::Wait(&s.k_full[stage][part], parity);
#pragma unroll
    for (int i = 0; i < NumPanels(part); ++i) {
      const int panel = FirstPanel(part) + i;
      hopper::BeginProducts();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = panel * kLatentPanelBytes + step * 32;
        hopper::MultiplyShared(scores, hopper::Advance(queries, at), hopper::Advance(keys, at),
                               part + i + step > 0);
      }
    }
  }
  hopper::CommitProducts();
}

// The sums of the warpgroup's 256 columns over a tile's keys.
__device__ inline void StartSums(float (&out)[128], const uint32_t (&weights)[4][4],
                                 const uint8_t* v, int group) {
  const uint64_t values =
      hopper::Operand(v + group * 4 * kLatentPanelBytes, kLatentPanelBytes, 1024);
  hopper::BeginProducts();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    hopper::MultiplyRegisters(out, weights[step], hopper::Advance(values, step * 2048), 1);
  }
  hopper::CommitProducts();
}

__device__ inline int FirstQuery() { return (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4; }

// Hands the scores' weights, and what they are relative to, to the other warpgroup.
__device__ inline void HandOver(const uint32_t (&weights)[4][4], const Softmax& state, int group,
                                LatentShared& s) {
  const int thread = threadIdx.x & 127;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    s.weights[i][thread] = make_uint4(weights[i][0], weights[i][1], weights[i][2], weights[i][3]);
  }
  if ((thread & 3) == 0) {
    s.peaks[group][FirstQuery()] = state.peak[0];
    s.peaks[group][FirstQuery() + 8] = state.peak[1];
  }
}

// Takes the other's weights, and brings the own sums to what they are relative to.
__device__ inline void TakeOver(uint32_t (&weights)[4][4], Softmax& state, float (&out)[128],
                                float scale, int group, const LatentShared& s) {
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float peak = s.peaks[group ^ 1][FirstQuery() + half * 8];
    shrink[half] = 1.0f;
    if (peak != state.peak[half]) shrink[half] = FastExp2((state.peak[half] - peak) * scale);
    state.peak[half] = peak;
    state.total[half] *= shrink[half];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 four = s.weights[i][threadIdx.x & 127];
    weights[i][0] = four.x;
    weights[i][1] = four.y;
    weights[i][2] = four.z;
    weights[i][3] = four.w;
  }
  Shrink(out, shrink);
}

__device__ inline void HideKeys(float (&scores)[32], const int (&ends)[2], int first_key) {
  const int column = first_key + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (column + i / 4 * 8 + (i & 1) >= ends[i >> 1 & 1]) scores[i] = -INFINITY;
  }
}

// Writes the warpgroup's columns: the result, or the part of it.
__device__ inline void StoreSums(const float (&out)[128], const Softmax& state,
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
      call.stats[place] = make_float2(state.peak[half] * shape.scale, total[half]);
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
    AddParts(
        call.partial, call.stats, job.parts,
        [&](int part) { return static_cast<int64_t>(base + part) * shape.num_heads + head; },
        call.out + (static_cast<int64_t>(job.token) * shape.num_heads + head) * kLatent);
  }
}

// Which of a tile's keys each of the thread's two queries sees.
struct LatentMask {
  int ends[2];
  int seen_by_all;
  int begin;

  __device__ LatentMask(const LatentJob& job, const LatentShape& shape)
      : seen_by_all(min(job.visible, job.end)), begin(job.begin) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ends[half] = min(job.visible + (FirstQuery() + half * 8) / shape.heads_per_tile, job.end);
    }
  }

  __device__ inline void Hide(float (&scores)[32], int tile) const {
    const int first = begin + tile * kKeyTile;
    if (first + kKeyTile > seen_by_all) HideKeys(scores, ends, first);
  }
};

constexpr int kFirstReady = 1, kSecondReady = 2;  // barriers: weights are there to be taken

__device__ inline void Release(LatentShared& s, int stage, int part) {
  if ((threadIdx.x & 31) == 0) hopper::Arrive(&s.k_empty[stage][part]);
}

// The first warpgroup: weights of even tiles, sums of the first half of the columns.
__device__ inline void ConsumeFirst(float (&out)[128], Softmax& state, const LatentMask& mask,
                                    int tiles, float scale, LatentShared& s) {
  float scores[32], shrink[2];
  uint32_t weights[4][4];
  for (int i = 0; i < tiles; i += 2) {
    StartScores(scores, s, 0, i >> 1 & 1);
    hopper::WaitProducts<0>();
    hopper::Pin(scores);
    Release(s, 0, kRotated);
    mask.Hide(scores, i);
    Weigh(scores, state, scale, shrink);
    Round(scores, weights);
    HandOver(weights, state, 0, s);
    hopper::Signal<kFirstReady, 256>();
    Shrink(out, shrink);
    StartSums(out, weights, s.k[0], 0);
    hopper::Sync<kSecondReady, 256>();
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    Release(s, 0, kLeft);
    if (i + 1 == tiles) break;
    TakeOver(weights, state, out, scale, 0, s);
    StartSums(out, weights, s.k[1], 0);
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    Release(s, 1, kLeft);
  }
}

// The second: weights of odd tiles, sums of the other half.
__device__ inline void ConsumeSecond(float (&out)[128], Softmax& state, const LatentMask& mask,
                                     int tiles, float scale, LatentShared& s) {
  float scores[32], shrink[2];
  uint32_t weights[4][4], mine[4][4];
  int i = 0;
  for (; i + 1 < tiles; i += 2) {
    StartScores(scores, s, 1, i >> 1 & 1);
    hopper::WaitProducts<0>();
    hopper::Pin(scores);
    Release(s, 1, kRotated);
    mask.Hide(scores, i + 1);
    hopper::Sync<kFirstReady, 256>();
    TakeOver(weights, state, out, scale, 1, s);
    StartSums(out, weights, s.k[0], 1);
    Weigh(scores, state, scale, shrink);
    Round(scores, mine);
    HandOver(mine, state, 1, s);
    hopper::Signal<kSecondReady, 256>();
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    Release(s, 0, kRight);
    Shrink(out, shrink);
    hopper::Pin(scores);  // what a product takes may not be made while another runs: made anew
    Round(scores, weights);
    StartSums(out, weights, s.k[1], 1);
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    Release(s, 1, kRight);
  }
  if (i == tiles) return;
  hopper::Sync<kFirstReady, 256>();
  TakeOver(weights, state, out, scale, 1, s);
  hopper::Signal<kSecondReady, 256>();
  StartSums(out, weights, s.k[0], 1);
  hopper::WaitProducts<0>();
  hopper::Pin(out);
}

__device__ inline void ConsumeLatents(const LatentCall& call, const LatentShape& shape,
                                      const LatentJob& job, int first_head, int base,
                                      LatentShared& s) {
  const int group = threadIdx.x / 128 - 1;
  const int tiles = (job.end - job.begin + kKeyTile - 1) / kKeyTile;
  const LatentMask mask(job, shape);
  float out[128];
  Softmax state;
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i] = 0.0f;
  hopper::Wait(&s.q_full, 0);
  if (group == 0) {
    ConsumeFirst(out, state, mask, tiles, shape.scale, s);
  } else {
    ConsumeSecond(out, state, mask, tiles, shape.scale, s);
  }
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
      for (int part = 0; part < kParts; ++part) {
        hopper::InitBarrier(&s.k_full[i][part], 1);
        hopper::InitBarrier(&s.k_empty[i][part], 4);
      }
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
