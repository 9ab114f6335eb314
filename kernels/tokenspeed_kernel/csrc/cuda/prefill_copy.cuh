// SPDX-License-Identifier: MIT
//
// What a block of prefill_attention.cu shares, and the warp in it that copies: it takes one job
// after the other and brings queries, keys and values, a tile of 128 keys at a time, ahead of those
// that multiply them. For Hopper alone.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/prefill_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kHead = 128;
constexpr int kPanel = 64;  // columns
constexpr int kPanelBytes = kPrefillKeys * kPanel * 2;
constexpr int kTileBytes = 2 * kPanelBytes;
constexpr int kStages = 2;
constexpr int kQuerySlots = 2;   // of which one is copied to ahead of its job
constexpr int kJobs = 4;         // descriptions kept: queries of two jobs, and their results
constexpr int kConsumers = 256;  // threads
constexpr int kTurn = 3;         // barrier of the first warpgroup's turn; the second's is the next
constexpr int kConsumerWarps = kConsumers / 32;

struct PrefillShape {
  int num_heads;
  int group;  // query heads of a KV head
  int num_kv_heads;
  int block_size;
  int tokens_per_tile;  // whose queries are a job's
  float scale;          // with log2(e) in it
  int64_t table_stride;
};

struct PrefillCall {
  const int* plan;
  const int* tables;
  const int* query_start;
  const int* kv_lens;
  __nv_bfloat16* out;  // [tokens, heads, 128]
  float* partial;      // [pieces, 64, 256]: sums as the threads of a block hold them
  float2* stats;       // [pieces, 128]: peak and total of a query
  int* counters;       // of cut tiles, KV heads and warps
  int* queue;          // the next job, and how many blocks have found none
};

struct Job {
  int kv_head;
  int row;
  int start;    // the row's first token
  int skipped;  // tokens of the row before the job's
  int queries;  // tokens of the row
  int context;  // keys before the row's first token
  int kv_len;
  int tile_end;
  int tiles;  // of keys; 0: there is no job any more
  int piece;
  int pieces;
  int place;
  int tile;
};

struct alignas(1024) PrefillShared {
  uint8_t q[kQuerySlots][kTileBytes];
  uint8_t k[kStages][kTileBytes];
  uint8_t v[kStages][kTileBytes];
  uint64_t q_full[kQuerySlots], q_empty[kQuerySlots];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  uint64_t tail;  // values that are not all there have arrived
  float kept[kConsumers];
  Job jobs[kJobs];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The job of this number; its tiles are 0 if there are not so many.
__device__ inline Job FindJob(int number, const PrefillCall& call, const PrefillShape& shape) {
  Job job;
  job.tiles = 0;
  if (number >= call.plan[0] * shape.num_kv_heads) return job;
  const auto* jobs = reinterpret_cast<const PrefillJob*>(call.plan + 4);
  const PrefillJob planned = jobs[number / shape.num_kv_heads];
  job.kv_head = number % shape.num_kv_heads;
  job.row = planned.row;
  job.start = call.query_start[job.row];
  job.queries = call.query_start[job.row + 1] - job.start;
  job.kv_len = call.kv_lens[job.row];
  job.context = job.kv_len - job.queries;
  job.skipped = planned.skipped;
  job.tile_end = planned.tile_end;
  job.tiles = planned.tile_end - planned.tile_begin;
  job.piece = planned.piece;
  job.pieces = planned.pieces;
  job.place = planned.place;
  job.tile = planned.tile;
  return job;
}

// How far the copying warp or a consumer has come.
struct Progress {
  int job = 0;
  int tile = 0;  // of keys, over all jobs
  int tail = 0;

  __device__ int Stage() const { return tile % kStages; }
  __device__ uint32_t Phase() const { return tile / kStages & 1; }
  __device__ int Slot() const { return job % kQuerySlots; }
  __device__ uint32_t JobPhase() const { return job / kQuerySlots & 1; }
};

// One warp copies the keys or values of a tile; every lane takes a block of the cache.
__device__ inline void CopyTile(uint8_t* to, const CUtensorMap* map, uint64_t* full,
                                const int* table, int first, const Job& job,
                                const PrefillShape& shape) {
  const int lane = threadIdx.x & 31;
  const int box = min(shape.block_size, kPrefillKeys);
  const int boxes = (min(kPrefillKeys, job.kv_len - first) + box - 1) / box;
  if (lane == 0) hopper::ArriveExpecting(full, boxes * box * kHead * 2);
  __syncwarp();
  if (lane < boxes) {
    const int at = first + lane * box;
    const int row =
        (table[at / shape.block_size] * shape.num_kv_heads + job.kv_head) * shape.block_size +
        at % shape.block_size;
    hopper::CopyBox(to + lane * box * 128, map, 0, row, full);
    hopper::CopyBox(to + kPanelBytes + lane * box * 128, map, kPanel, row, full);
  }
}

// Values past the row's last are zeroed: they weigh nothing, but nothing times NaN is NaN.
__device__ inline void ZeroTail(uint8_t* v, int exists) {
  for (int piece = exists * 16 + (threadIdx.x & 31); piece < kPrefillKeys * 16; piece += 32) {
    const int key = piece / 16, column = piece % 16;
    *reinterpret_cast<uint4*>(v + column / 8 * kPanelBytes + key * 128 + (column & 7) * 16) =
        make_uint4(0, 0, 0, 0);
  }
  hopper::FenceShared();
  __syncwarp();
}

__device__ inline void CopyValues(const CUtensorMap* map, const int* table, int first,
                                  const Job& job, const PrefillShape& shape, PrefillShared& s,
                                  const Progress& at, int& tails) {
  uint8_t* to = s.v[at.Stage()];
  hopper::Wait(&s.v_empty[at.Stage()], at.Phase() ^ 1);
  if (first + kPrefillKeys <= job.kv_len) {
    CopyTile(to, map, &s.v_full[at.Stage()], table, first, job, shape);
    return;
  }
  CopyTile(to, map, &s.tail, table, first, job, shape);
  hopper::Wait(&s.tail, tails++ & 1);
  ZeroTail(to, job.kv_len - first);
  if ((threadIdx.x & 31) == 0) hopper::Arrive(&s.v_full[at.Stage()]);
}

__device__ inline void CopyQueries(const CUtensorMap* map, const Job& job,
                                   const PrefillShape& shape, PrefillShared& s,
                                   const Progress& at) {
  uint64_t* full = &s.q_full[at.Slot()];
  hopper::Wait(&s.q_empty[at.Slot()], at.JobPhase() ^ 1);
  if ((threadIdx.x & 31) != 0) return;
  s.jobs[at.job % kJobs] = job;
  if (job.tiles == 0) return hopper::Arrive(full);
  hopper::ArriveExpecting(full, shape.tokens_per_tile * shape.group * kHead * 2);
  for (int panel = 0; panel < 2; ++panel) {
    hopper::CopyBox(s.q[at.Slot()] + panel * kPanelBytes, map, panel * kPanel,
                    job.kv_head * shape.group, job.start + job.skipped, full);
  }
}

// The warp that copies: all jobs of the block. Keys of a tile come before the values of the last.
__device__ inline void Produce(const CUtensorMap* q_map, const CUtensorMap* k_map,
                               const CUtensorMap* v_map, const PrefillCall& call,
                               const PrefillShape& shape, PrefillShared& s) {
  Progress at;
  int tails = 0;
  Job job = FindJob(blockIdx.x, call, shape);
  for (;; ++at.job) {
    CopyQueries(q_map, job, shape, s, at);
    if (job.tiles == 0) break;
    int next = 0;
    if ((threadIdx.x & 31) == 0) next = gridDim.x + atomicAdd(&call.queue[0], 1);
    const int* table = call.tables + job.row * shape.table_stride;
    const auto first_key = [&](int i) { return (job.tile_end - 1 - i) * kPrefillKeys; };
    const auto copy_keys = [&](int i) {
      Progress there = at;
      there.tile += i;
      hopper::Wait(&s.k_empty[there.Stage()], there.Phase() ^ 1);
      CopyTile(s.k[there.Stage()], k_map, &s.k_full[there.Stage()], table, first_key(i), job,
               shape);
    };
    copy_keys(0);
    for (int i = 0; i < job.tiles; ++i) {
      if (i + 1 < job.tiles) copy_keys(i + 1);
      Progress there = at;
      there.tile += i;
      CopyValues(v_map, table, first_key(i), job, shape, s, there, tails);
    }
    at.tile += job.tiles;
    job = FindJob(__shfl_sync(0xffffffffu, next, 0), call, shape);
  }
  // The block that ends last leaves the queue as it was.
  if ((threadIdx.x & 31) == 0 && atomicAdd(&call.queue[1], 1) == gridDim.x - 1) {
    call.queue[0] = call.queue[1] = 0;
  }
}

#endif  // sm_90a

}  // namespace tokenspeed
