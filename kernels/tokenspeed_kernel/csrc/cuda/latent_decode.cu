// SPDX-License-Identifier: MIT
//
// Multi-head latent attention of rows of one query and up to sixteen heads, for Hopper: bound by
// reading the cache, 512 + 64 numbers a token that serve as keys and, but for the last 64, values.
//
// All rows' keys, in tiles of 64, make one line that is cut into as many equal shares as there are
// blocks: latent_plan, once a step. A block goes through its share row by row. A copying warp fills
// a ring of chunks of 16 keys (and of a row's queries), up to twelve ahead and across rows, so that
// the memory always has 200 KB to bring to each core. Eight warps multiply: each has the queries in
// registers and eight keys of a tile for the scores, and 64 columns for the sums; largest scores
// and weights meet in shared memory. Of a row that is cut, the block that comes last adds up the
// parts. Launched by attention/cuda_mla.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/latent_parts.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/latent_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/softmax.cuh"

namespace tokenspeed {

constexpr int kFewHeads = 16;
constexpr int kFewWarps = 8;
constexpr int kChunkKeys = 16;
constexpr int kTokenBytes = kPanels * 128;
constexpr int kChunkBytes = kChunkKeys * kTokenBytes;
constexpr int kChunks = 12;

struct FewShape {
  int num_heads;
  int block_size;
  float scale;  // with log2(e) in it
  int64_t table_stride;
};

struct FewCall {
  const int* tables;
  const int* kv_lens;
  __nv_bfloat16* out;  // [rows, heads, 512]
  float* partial;      // [2 * blocks, heads, 512]
  float2* stats;       // [2 * blocks, heads]: the peak, and the sum of what exceeds it
  int* counters;       // of rows
};

// A token of a chunk is nine panels of 128 bytes, side by side. The copy engine permutes 16-byte
// pieces of 128 bytes by the number of those, modulo 8: that is token + panel.
struct alignas(1024) FewShared {
  uint8_t ring[kChunks][kChunkBytes];
  __nv_bfloat16 weights[kFewHeads][kLatentTile + 8];  // padded against bank conflicts
  float peaks[kFewHeads][kFewWarps];
  float totals[kFewHeads][kFewWarps];
  uint64_t full[kChunks], empty[kChunks];
  int last;
};

// Keys [begin, end) of a row; `first` and `last` are the blocks that have the row's ends.
struct Segment {
  int row;
  int begin;
  int end;
  int kv_len;
  int before;  // tiles of earlier rows
  int first;
  int last;
};

// The segments of a block's share, one after another.
struct Walk {
  const LatentPlan& plan;
  const FewCall& call;
  int share;
  int at;  // tile in the line
  int end;
  int row;

  __device__ Walk(const LatentPlan& all, const FewCall& launch) : plan(all), call(launch) {
    share = __ldcg(plan.head);
    at = blockIdx.x * share;
    end = min(at + share, __ldcg(plan.head + 1));
    row = at < end ? __ldcg(plan.first_row + blockIdx.x) : 0;
  }

  __device__ inline bool Next(Segment* segment) {
    if (at >= end) return false;
    int before = __ldcg(plan.before + row), after = __ldcg(plan.before + row + 1);
    while (after <= at) {  // rows without keys
      before = after;
      after = __ldcg(plan.before + ++row + 1);
    }
    const int stop = min(after, end);
    segment->row = row;
    segment->kv_len = __ldcg(call.kv_lens + row);
    segment->begin = (at - before) * kLatentTile;
    segment->end = min((stop - before) * kLatentTile, segment->kv_len);
    segment->before = before;
    segment->first = before / share;
    segment->last = (after - 1) / share;
    at = stop;
    ++row;
    return true;
  }
};

// Where parts of a row lie among all: of a block's share at most two rows are cut.
__device__ inline int PartPlace(const Segment& segment, int block, int share) {
  return 2 * block + (block * share < segment.before);
}

struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  __device__ inline void Advance(int chunks) {
    slot += chunks;
    if (slot >= kChunks) {
      slot -= kChunks;
      parity ^= 1;
    }
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kFewThreads = kFewWarps * 32;
constexpr int kSteps = kPanels * 4;  // products of 16 columns

// Brings queries and keys of all segments in the order of use. The first queries, which the kernel
// ahead may still write, come after keys that are older than the step.
__device__ inline void ProduceFew(const CUtensorMap* q_map, const CUtensorMap* k_map,
                                  const FewCall& call, const FewShape& shape, Walk walk,
                                  FewShared& s) {
  const int lane = threadIdx.x & 31;
  Ring ring;
  Segment segment;
  bool waited = false, first = true;
  int first_row = 0;
  const auto bring_queries = [&](int slot, int row) {
    if (lane != 0) return;
    hopper::ArriveExpecting(&s.full[slot], shape.num_heads * kTokenBytes);
    hopper::CopyBox(s.ring[slot], q_map, 0, 0, 0, row, &s.full[slot]);
  };
  const auto begin = [&] {
    WaitForPrevious();
    bring_queries(0, first_row);
    waited = true;
  };
  while (walk.Next(&segment)) {
    if (first) {
      first_row = segment.row;
    } else {
      hopper::Wait(&s.empty[ring.slot], ring.parity ^ 1);
      bring_queries(ring.slot, segment.row);
    }
    first = false;
    ring.Advance(1);
    const int* table = call.tables + segment.row * shape.table_stride;
    for (int group = segment.begin; group < segment.end; group += 32 * kChunkKeys) {
      const int mine = group + lane * kChunkKeys;
      int at = 0;
      if (mine < segment.end) {
        at = table[mine / shape.block_size] * shape.block_size + mine % shape.block_size;
      }
      const int chunks = min(32, (segment.end - group + kChunkKeys - 1) / kChunkKeys);
      for (int i = 0; i < chunks; ++i) {
        const int end = group + (i + 1) * kChunkKeys;
        if (!waited && (end >= segment.kv_len || ring.parity != 0)) begin();
        const int from = __shfl_sync(0xffffffffu, at, i);
        hopper::Wait(&s.empty[ring.slot], ring.parity ^ 1);
        if (lane == 0) {
          hopper::ArriveExpecting(&s.full[ring.slot], kChunkBytes);
          hopper::CopyBox(s.ring[ring.slot], k_map, 0, 0, from, &s.full[ring.slot]);
        }
        __syncwarp();
        ring.Advance(1);
      }
    }
  }
  if (!waited) begin();
}

__device__ inline void LoadMatrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ inline void LoadTransposed(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// d [16, 8] += a [16, 16] @ b [16, 8].
__device__ inline void MultiplySmall(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void LoadFewQueries(uint32_t (&query)[kSteps][4], const uint8_t* chunk) {
  const int lane = threadIdx.x & 31, head = lane & 15, side = lane >> 4;
  const uint32_t from = hopper::SharedAddress(chunk) + head * kTokenBytes;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const uint32_t at = from + panel * 128 + ((((head + panel) << 4) & 0x70) ^ (side << 4));
#pragma unroll
    for (int step = 0; step < 4; ++step) LoadMatrices(query[panel * 4 + step], at ^ (step << 5));
  }
}

// Scores of all heads and the warp's eight keys: heads lane / 4 and eight above, keys two a lane.
__device__ inline void ScoreKeys(float (&score)[4], const uint32_t (&query)[kSteps][4],
                                 const uint8_t* chunk, int half) {
  const int lane = threadIdx.x & 31, key = half * 8 + (lane & 7), piece = lane >> 3;
  const uint32_t from = hopper::SharedAddress(chunk) + key * kTokenBytes;
  float sum[2][4] = {};
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const uint32_t at = from + panel * 128 + ((((key + panel) << 4) & 0x70) ^ (piece << 4));
    uint32_t low[4], high[4];
    LoadMatrices(low, at);
    LoadMatrices(high, at ^ 0x40);
    MultiplySmall(sum[0], query[panel * 4], low[0], low[1]);
    MultiplySmall(sum[1], query[panel * 4 + 1], low[2], low[3]);
    MultiplySmall(sum[0], query[panel * 4 + 2], high[0], high[1]);
    MultiplySmall(sum[1], query[panel * 4 + 3], high[2], high[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) score[i] = sum[0][i] + sum[1][i];
}

// Adds the chunk's keys to the sums of the warp's 64 columns. What is past the last key weighs
// nothing, but nothing times NaN is NaN: with CUT it is replaced by zeros.
template <bool CUT>
__device__ inline void SumChunk(float (&out)[8][4], const uint8_t* chunk, int index, int exist,
                                const FewShared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = lane & 15, side = lane >> 4;
  uint32_t weight[4];
  LoadMatrices(weight, hopper::SharedAddress(&s.weights[row][index * kChunkKeys + side * 8]));
  uint32_t keep[2] = {0xffffffffu, 0xffffffffu};
  if (CUT) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = (lane & 3) * 2 + i * 8;
      keep[i] = (key < exist ? 0xffffu : 0u) | (key + 1 < exist ? 0xffff0000u : 0u);
    }
  }
  const uint32_t from = hopper::SharedAddress(chunk) + row * kTokenBytes + warp * 128 +
                        ((((row + warp) << 4) & 0x70) ^ (side << 4));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t value[4];
    LoadTransposed(value, from ^ (i << 5));
    if (CUT) {
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] &= keep[j & 1];
    }
    MultiplySmall(out[2 * i], weight, value[0], value[1]);
    MultiplySmall(out[2 * i + 1], weight, value[2], value[3]);
  }
}

// Leaves the weights of the warp's keys for all warps.
__device__ inline void ShareWeights(float (&score)[4], Softmax& state, float scale,
                                    float (&out)[8][4], FewShared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = lane >> 2, key = warp * 8 + (lane & 3) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float peak = fmaxf(score[half * 2], score[half * 2 + 1]);
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    if ((lane & 3) == 0) s.peaks[head + half * 8][warp] = peak;
  }
  hopper::Sync<1, kFewThreads>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto* all = reinterpret_cast<const float4*>(s.peaks[head + half * 8]);
    const float4 low = all[0], high = all[1];
    const float peak = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)),
                             fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
    if ((peak - state.peak[half]) * scale > kLeastGrowth) {
      const float shrink = FastExp2((state.peak[half] - peak) * scale);
      state.peak[half] = peak;
      state.total[half] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[i][half * 2] *= shrink;
        out[i][half * 2 + 1] *= shrink;
      }
    }
    const float base = state.peak[half] * scale;
    const float left = FastExp2(fmaf(score[half * 2], scale, -base));
    const float right = FastExp2(fmaf(score[half * 2 + 1], scale, -base));
    state.total[half] += left + right;
    *reinterpret_cast<__nv_bfloat162*>(&s.weights[head + half * 8][key]) =
        __floats2bfloat162_rn(left, right);
  }
  hopper::Sync<1, kFewThreads>();
}

// Writes the warp's columns, the result or the part of it, and adds up parts if this is the last.
__device__ inline void FinishSegment(const float (&out)[8][4], const Softmax& state,
                                     const FewCall& call, const FewShape& shape,
                                     const Segment& segment, int share, FewShared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int column = warp * 64 + (lane & 3) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float mine = WholeTotal(state.total[half]);
    if ((lane & 3) == 0) s.totals[(lane >> 2) + half * 8][warp] = mine;
  }
  hopper::Sync<1, kFewThreads>();
  const bool whole = segment.first == segment.last;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = (lane >> 2) + half * 8;
    if (head >= shape.num_heads) continue;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kFewWarps; ++i) total += s.totals[head][i];
    if (whole) {
      const float scale = 1.0f / total;
      __nv_bfloat16* to = call.out +
                          (static_cast<int64_t>(segment.row) * shape.num_heads + head) * kLatent +
                          column;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        *reinterpret_cast<__nv_bfloat162*>(to + i * 8) =
            __floats2bfloat162_rn(out[i][half * 2] * scale, out[i][half * 2 + 1] * scale);
      }
      continue;
    }
    const int64_t place =
        static_cast<int64_t>(PartPlace(segment, blockIdx.x, share)) * shape.num_heads + head;
    float* to = call.partial + place * kLatent + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      *reinterpret_cast<float2*>(to + i * 8) = make_float2(out[i][half * 2], out[i][half * 2 + 1]);
    }
    if (warp == 0 && (lane & 3) == 0) {
      call.stats[place] = make_float2(state.peak[half] * shape.scale, total);
    }
  }
  if (whole) return;
  __threadfence();
  hopper::Sync<1, kFewThreads>();
  if (threadIdx.x == 0) {
    int* counter = &call.counters[segment.row];
    s.last = atomicAdd(counter, 1) == segment.last - segment.first;
    if (s.last) *counter = 0;
  }
  hopper::Sync<1, kFewThreads>();
  if (!s.last) return;
  __threadfence();
  for (int head = warp; head < shape.num_heads; head += kFewWarps) {
    AddParts(
        call.partial, call.stats, segment.last - segment.first + 1,
        [&](int part) {
          const int place = PartPlace(segment, segment.first + part, share);
          return static_cast<int64_t>(place) * shape.num_heads + head;
        },
        call.out + (static_cast<int64_t>(segment.row) * shape.num_heads + head) * kLatent);
  }
}

__device__ inline void ConsumeFew(const FewCall& call, const FewShape& shape, Walk walk,
                                  FewShared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Ring ring;
  Segment segment;
  const auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) hopper::Arrive(&s.empty[slot]);
  };
  WaitForPrevious();
  while (walk.Next(&segment)) {
    uint32_t query[kSteps][4];
    hopper::Wait(&s.full[ring.slot], ring.parity);
    LoadFewQueries(query, s.ring[ring.slot]);
    release(ring.slot);
    ring.Advance(1);
    Softmax state;
    float out[8][4] = {};
    for (int first = segment.begin; first < segment.end; first += kLatentTile) {
      const int keys = min(kLatentTile, segment.end - first);
      const int chunks = (keys + kChunkKeys - 1) / kChunkKeys;
      float score[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if (warp / 2 < chunks) {
        Ring mine = ring;
        mine.Advance(warp / 2);
        hopper::Wait(&s.full[mine.slot], mine.parity);
        ScoreKeys(score, query, s.ring[mine.slot], warp & 1);
        const int key = warp * 8 + (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (key + (i & 1) >= keys) score[i] = -INFINITY;
        }
      }
      ShareWeights(score, state, shape.scale, out, s);
#pragma unroll 1
      for (int i = 0; i < chunks; ++i) {
        hopper::Wait(&s.full[ring.slot], ring.parity);
        if ((i + 1) * kChunkKeys <= keys) {
          SumChunk<false>(out, s.ring[ring.slot], i, kChunkKeys, s);
        } else {
          SumChunk<true>(out, s.ring[ring.slot], i, keys - i * kChunkKeys, s);
        }
        release(ring.slot);
        ring.Advance(1);
      }
    }
    FinishSegment(out, state, call, shape, segment, walk.share, s);
  }
}

#endif  // sm_90a

}  // namespace tokenspeed

extern "C" __global__ void __launch_bounds__(384, 1)
    latent_decode_few_bf16(const __grid_constant__ CUtensorMap q_map,
                           const __grid_constant__ CUtensorMap k_map, const int* memory,
                           const int* tables, const int* kv_lens, __nv_bfloat16* out,
                           float* partial, float2* stats, int* counters,
                           const tokenspeed::FewShape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace tokenspeed;
  extern __shared__ uint8_t shared[];
  auto& s =
      *reinterpret_cast<FewShared*>((reinterpret_cast<uintptr_t>(shared) + 1023) / 1024 * 1024);
  const FewCall call = {tables, kv_lens, out, partial, stats, counters};
  const LatentPlan plan(memory, gridDim.x);
  LaunchDependents();
  const Walk walk(plan, call);
  if (walk.at >= walk.end) return WaitForPrevious();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kChunks; ++i) {
      hopper::InitBarrier(&s.full[i], 1);
      hopper::InitBarrier(&s.empty[i], kFewWarps);
    }
    hopper::FenceShared();
  }
  __syncthreads();
  if (threadIdx.x >= kFewThreads) {
    hopper::GiveRegisters<24>();
    if (threadIdx.x < kFewThreads + 32) ProduceFew(&q_map, &k_map, call, shape, walk, s);
  } else {
    hopper::TakeRegisters<240>();
    ConsumeFew(call, shape, walk, s);
  }
#endif
}
