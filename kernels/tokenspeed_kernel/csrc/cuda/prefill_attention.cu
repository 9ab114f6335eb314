// SPDX-License-Identifier: MIT
//
// Causal attention of rows with many queries over paged keys and values, for Hopper, head size 128.
//
// A block has 128 queries of one row and head: two warpgroups with 64 each, and one warp that
// copies tiles of 128 keys and values, block by block of the cache, two ahead. Each warpgroup
// multiplies its queries with the next keys while it takes the softmax of the last and multiplies
// those with their values (as FlashAttention-3, Shah et al. 2024). Tiles are visited from the
// diagonal down to the first. Base-2 softmax. Launched by attention/cuda_prefill.py, which makes
// the tensor maps.
#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kHead = 128;
constexpr int kKeys = 128;     // of a tile
constexpr int kQueries = 128;  // of a block
constexpr int kPanel = 64;     // columns
constexpr int kPanelBytes = kKeys * kPanel * 2;
constexpr int kTileBytes = 2 * kPanelBytes;
constexpr int kStages = 2;
constexpr int kConsumers = 256;  // threads
constexpr int kTurn = 3;         // barrier of the first warpgroup's turn; the second's is the next
constexpr int kConsumerWarps = kConsumers / 32;

struct PrefillShape {
  int num_heads;
  int group;  // query heads of a KV head
  int num_kv_heads;
  int block_size;
  int num_rows;
  int first_row;
  int64_t q_stride;  // between tokens
  int64_t table_stride;
  float scale;  // with log2(e) in it
};

struct alignas(1024) PrefillShared {
  uint8_t q[kTileBytes];
  uint8_t k[kStages][kTileBytes];
  uint8_t v[kStages][kTileBytes];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
};

// Which queries a block has.
struct Job {
  int head;
  int row;
  int start;    // the row's first token
  int skipped;  // queries of the row before this block's
  int queries;  // of the row
  int context;  // keys before the row's first query
  int kv_len;
  int tiles;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The longest blocks come first. False for a block past the end of its row.
__device__ inline bool FindJob(const int* query_start, const int* kv_lens,
                               const PrefillShape& shape, Job* job) {
  const int per_tile = shape.num_rows * shape.num_heads;
  const int tiles = gridDim.x / per_tile;
  const int rest = blockIdx.x % per_tile;
  job->head = rest % shape.num_heads;
  job->row = rest / shape.num_heads + shape.first_row;
  job->start = query_start[job->row];
  job->queries = query_start[job->row + 1] - job->start;
  job->kv_len = kv_lens[job->row];
  job->context = job->kv_len - job->queries;
  job->skipped = (tiles - 1 - static_cast<int>(blockIdx.x) / per_tile) * kQueries;
  const int end = min(job->context + job->skipped + kQueries, job->kv_len);
  job->tiles = (end + kKeys - 1) / kKeys;
  return job->skipped < job->queries;
}

// One warp copies the keys or values of a tile; every lane takes a block of the cache.
__device__ inline void CopyTile(uint8_t* to, const CUtensorMap* map, uint64_t* full,
                                const int* table, int tile, const Job& job,
                                const PrefillShape& shape) {
  const int lane = threadIdx.x & 31;
  const int box = min(shape.block_size, kKeys);
  const int first = tile * kKeys;
  const int boxes = (min(kKeys, job.kv_len - first) + box - 1) / box;
  if (lane == 0) hopper::ArriveExpecting(full, boxes * box * kHead * 2);
  __syncwarp();
  if (lane < boxes) {
    const int at = first + lane * box;
    const int block = table[at / shape.block_size];
    const int row = (block * shape.num_kv_heads + job.head / shape.group) * shape.block_size +
                    at % shape.block_size;
    hopper::CopyBox(to + lane * box * 128, map, 0, row, full);
    hopper::CopyBox(to + kPanelBytes + lane * box * 128, map, kPanel, row, full);
  }
}

__device__ inline void Produce(const CUtensorMap* k_map, const CUtensorMap* v_map, const int* table,
                               const Job& job, const PrefillShape& shape, PrefillShared& s) {
  for (int i = 0; i < job.tiles; ++i) {
    const int stage = i % kStages;
    const uint32_t parity = (i / kStages & 1) ^ 1;
    hopper::Wait(&s.k_empty[stage], parity);
    CopyTile(s.k[stage], k_map, &s.k_full[stage], table, job.tiles - 1 - i, job, shape);
    hopper::Wait(&s.v_empty[stage], parity);
    CopyTile(s.v[stage], v_map, &s.v_full[stage], table, job.tiles - 1 - i, job, shape);
  }
}

// The warpgroup's 64 queries, swizzled; zeros past the row's last.
__device__ inline void LoadQueries(const __nv_bfloat16* q, const Job& job,
                                   const PrefillShape& shape, int group, PrefillShared& s) {
  const int thread = threadIdx.x & 127;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int piece = thread + i * 128;  // 16 bytes; 16 of them in a query
    const int query = group * 64 + piece / 16;
    const int column = piece % 16;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (job.skipped + query < job.queries) {
      const int64_t token = job.start + job.skipped + query;
      value = *reinterpret_cast<const uint4*>(q + token * shape.q_stride + job.head * kHead +
                                              column * 8);
    }
    const int place = query * 128 + ((column & 7) ^ (query & 7)) * 16;
    *reinterpret_cast<uint4*>(s.q + column / 8 * kPanelBytes + place) = value;
  }
}

// Values past the row's last are zeroed: they weigh nothing, but nothing times NaN is NaN.
__device__ inline void ZeroTail(uint8_t* v, int exists) {
  for (int piece = exists * 16 + threadIdx.x - 128; piece < kKeys * 16; piece += kConsumers) {
    const int key = piece / 16, column = piece % 16;
    *reinterpret_cast<uint4*>(v + column / 8 * kPanelBytes + key * 128 + (column & 7) * 16) =
        make_uint4(0, 0, 0, 0);
  }
  hopper::FenceShared();
  hopper::Sync<2, kConsumers>();
}

__device__ inline void StartScores(float (&scores)[64], const uint8_t* q, const uint8_t* k) {
  hopper::BeginProducts();
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    const int at = step / 4 * kPanelBytes + step % 4 * 32;
    hopper::MultiplyShared(scores, hopper::Operand(q + at, 16, 1024),
                           hopper::Operand(k + at, 16, 1024), step > 0);
  }
  hopper::CommitProducts();
}

__device__ inline void StartOutput(float (&out)[64], const uint32_t (&weights)[8][4],
                                   const uint8_t* v) {
  hopper::BeginProducts();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    hopper::MultiplyRegisters(out, weights[step],
                              hopper::Operand(v + step * 2048, kPanelBytes, 1024), 1);
  }
  hopper::CommitProducts();
}

struct Softmax {
  float peak[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.0f, 0.0f};
};

// Hides keys at or past each query's end; a thread has two queries, eight apart.
__device__ inline void Mask(float (&scores)[64], const int (&ends)[2], int first_key) {
  const int column = first_key + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (column + i / 4 * 8 + (i & 1) >= ends[i >> 1 & 1]) scores[i] = -INFINITY;
  }
}

// Turns scores into weights; `shrink` is what earlier sums are worth now.
__device__ inline void Weigh(float (&scores)[64], Softmax& state, float scale, float (&shrink)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float peak = state.peak[half];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      peak = fmaxf(peak, fmaxf(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
    }
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    const float base = peak == -INFINITY ? 0.0f : peak * scale;
    shrink[half] = FastExp2(state.peak[half] * scale - base);
    state.peak[half] = peak;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[i * 4 + half * 2 + j];
        score = FastExp2(fmaf(score, scale, -base));
        total += score;
      }
    }
    state.total[half] = state.total[half] * shrink[half] + total;
  }
}

__device__ inline void Round(const float (&scores)[64], uint32_t (&weights)[8][4]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(scores[2 * i], scores[2 * i + 1]);
    weights[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

__device__ inline void StoreOutput(const float (&out)[64], const Softmax& state, const Job& job,
                                   const PrefillShape& shape, int query, __nv_bfloat16* to) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = state.total[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float share = total == 0.0f ? 0.0f : 1.0f / total;
    const int mine = job.skipped + query + half * 8;
    if (mine >= job.queries) continue;
    const int64_t token = job.start + mine;
    __nv_bfloat16* place =
        to + (token * shape.num_heads + job.head) * kHead + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      *reinterpret_cast<__nv_bfloat162*>(place + i * 8) =
          __floats2bfloat162_rn(out[i * 4 + half * 2] * share, out[i * 4 + half * 2 + 1] * share);
    }
  }
}

__device__ inline void Shrink(float (&out)[64], const float (&shrink)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] *= shrink[i >> 1 & 1];
}

__device__ inline void TakeTurn(int group) {
  if (group == 0) {
    hopper::Sync<kTurn, kConsumers>();
  } else {
    hopper::Sync<kTurn + 1, kConsumers>();
  }
}

__device__ inline void GiveTurn(int group) {
  if (group == 0) {
    hopper::Signal<kTurn + 1, kConsumers>();
  } else {
    hopper::Signal<kTurn, kConsumers>();
  }
}

__device__ inline void Consume(const __nv_bfloat16* q, __nv_bfloat16* to, const Job& job,
                               const PrefillShape& shape, PrefillShared& s) {
  const int group = threadIdx.x / 128 - 1;
  const int lane = threadIdx.x & 31;
  const int query = group * 64 + (threadIdx.x / 32 & 3) * 16 + lane / 4;
  const int sees = job.context + job.skipped + query + 1;
  const int ends[2] = {min(sees, job.kv_len), min(sees + 8, job.kv_len)};
  const int seen_by_all = job.context + job.skipped + group * 64 + 1;
  LoadQueries(q, job, shape, group, s);
  hopper::FenceShared();
  hopper::Sync<1, kConsumers>();

  const uint8_t* const mine = s.q + group * 64 * 128;
  float scores[64], out[64];
  uint32_t weights[8][4];
  float shrink[2];
  Softmax state;
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] = 0.0f;

  hopper::Wait(&s.k_full[0], 0);
  StartScores(scores, mine, s.k[0]);
  hopper::WaitProducts<0>();
  hopper::Pin(scores);
  if (lane == 0) hopper::Arrive(&s.k_empty[0]);
  const int last_tile = (job.tiles - 1) * kKeys;
  if (last_tile + kKeys > seen_by_all) Mask(scores, ends, last_tile);
  Weigh(scores, state, shape.scale, shrink);
  Round(scores, weights);
  hopper::Wait(&s.v_full[0], 0);
  if (last_tile + kKeys > job.kv_len) ZeroTail(s.v[0], job.kv_len - last_tile);

  // The warpgroups take turns at starting products: one's softmax runs while the other multiplies.
  if (group == 1) hopper::Signal<kTurn, kConsumers>();
  for (int i = 1; i < job.tiles; ++i) {
    const int stage = i % kStages, before = (i - 1) % kStages;
    hopper::Wait(&s.k_full[stage], i / kStages & 1);
    TakeTurn(group);
    StartScores(scores, mine, s.k[stage]);
    Shrink(out, shrink);
    hopper::Wait(&s.v_full[before], (i - 1) / kStages & 1);
    StartOutput(out, weights, s.v[before]);
    GiveTurn(group);
    hopper::WaitProducts<1>();
    hopper::Pin(scores);
    if (lane == 0) hopper::Arrive(&s.k_empty[stage]);
    const int first_key = (job.tiles - 1 - i) * kKeys;
    if (first_key + kKeys > seen_by_all) Mask(scores, ends, first_key);
    Weigh(scores, state, shape.scale, shrink);
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    if (lane == 0) hopper::Arrive(&s.v_empty[before]);
    Round(scores, weights);
  }
  const int stage = (job.tiles - 1) % kStages;
  Shrink(out, shrink);
  hopper::Wait(&s.v_full[stage], (job.tiles - 1) / kStages & 1);
  StartOutput(out, weights, s.v[stage]);
  hopper::WaitProducts<0>();
  hopper::Pin(out);
  StoreOutput(out, state, job, shape, query, to);
}

#endif  // sm_90a

}  // namespace tokenspeed

extern "C" __global__ void __launch_bounds__(384, 1)
    prefill_attention_bf16(const __grid_constant__ CUtensorMap k_map,
                           const __grid_constant__ CUtensorMap v_map, const __nv_bfloat16* q,
                           const int* block_tables, const int* query_start, const int* kv_lens,
                           __nv_bfloat16* out, const tokenspeed::PrefillShape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace tokenspeed;
  extern __shared__ uint8_t memory[];
  auto& s =
      *reinterpret_cast<PrefillShared*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  LaunchDependents();
  WaitForPrevious();
  Job job;
  if (!FindJob(query_start, kv_lens, shape, &job)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      hopper::InitBarrier(&s.k_full[i], 1);
      hopper::InitBarrier(&s.v_full[i], 1);
      hopper::InitBarrier(&s.k_empty[i], kConsumerWarps);
      hopper::InitBarrier(&s.v_empty[i], kConsumerWarps);
    }
    hopper::FenceShared();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<24>();
    if (threadIdx.x < 32) {
      Produce(&k_map, &v_map, block_tables + job.row * shape.table_stride, job, shape, s);
    }
  } else {
    hopper::TakeRegisters<240>();
    Consume(q, out, job, shape, s);
  }
#endif
}
