// SPDX-License-Identifier: MIT
//
// What latent_attention.cu's blocks work on and how one warp of each brings it: queries, and 64
// keys at a time into two stages, each part of a stage as soon as its last reader has let it go.
// What is older than the step is copied before the kernel ahead has ended.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/decode_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/latent_parts.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/prefill_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kLatentQueries = 64;
constexpr int kLatentPanelBytes = 64 * 128;
constexpr int kLatentTileBytes = kPanels * kLatentPanelBytes;
constexpr int kLatentStages = 2;

// A tile's panels by who reads them last: scores, and the first and second half of the sums.
enum Part { kRotated, kLeft, kRight, kParts };
__device__ constexpr int FirstPanel(int part) {
  return part == kRotated ? 8 : part == kLeft ? 0 : 4;
}
__device__ constexpr int NumPanels(int part) { return part == kRotated ? 1 : 4; }

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
  uint4 weights[4][128];  // of the last tile, sixteen keys at a time, as threads multiply them
  float peaks[2][kLatentQueries];
  float totals[2][kLatentQueries];
  uint64_t q_full, k_full[kLatentStages][kParts], k_empty[kLatentStages][kParts];
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

// Copies the tiles of a job.
struct LatentCopies {
  const CUtensorMap* map;
  const int* table;
  int end;
  int block_size;

  __device__ inline int Box() const { return min(block_size, kKeyTile); }
  __device__ inline int Boxes(int first) const {
    return (min(kKeyTile, end - first) + Box() - 1) / Box();
  }
  __device__ inline int Row(int key) const {
    return __ldg(table + key / block_size) * block_size + key % block_size;
  }

  // One of the tile's parts; `row` is that of the lane's box.
  __device__ inline void Bring(uint8_t* to, int part, int row, int boxes, uint64_t* full) const {
    const int lane = threadIdx.x & 31, box = Box();
    if (lane == 0) hopper::ArriveExpecting(full, boxes * box * NumPanels(part) * 128);
    __syncwarp();
    if (lane >= boxes * NumPanels(part)) return;
    const int panel = FirstPanel(part) + lane / boxes;
    hopper::CopyBox(to + panel * kLatentPanelBytes + lane % boxes * box * 128, map, panel * 64, row,
                    full);
  }
};

__device__ inline void ProduceLatents(const CUtensorMap* q_map, const CUtensorMap* k_map,
                                      const LatentCall& call, const LatentShape& shape,
                                      const LatentJob& job, int first_head, LatentShared& s) {
  const LatentCopies copies = {k_map, call.tables + job.row * shape.table_stride, job.end,
                               shape.block_size};
  const int lane = threadIdx.x & 31;
  const auto copy = [&](int i) {
    const int stage = i % kLatentStages, first = job.begin + i * kKeyTile;
    const int boxes = copies.Boxes(first), row = copies.Row(first + lane % boxes * copies.Box());
    const bool cut = first + kKeyTile > job.end;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (i >= kLatentStages) {
        hopper::Wait(&s.k_empty[stage][part], (i / kLatentStages & 1) ^ 1);
      }
      if (!cut) copies.Bring(s.k[stage], part, row, boxes, &s.k_full[stage][part]);
    }
    if (!cut) return;
    if (lane == 0) hopper::ArriveExpecting(&s.tail, boxes * copies.Box() * kPanels * 128);
    __syncwarp();
    for (int box = lane; box < boxes * kPanels; box += 32) {
      const int at = box % boxes * copies.Box(), panel = box / boxes;
      hopper::CopyBox(s.k[stage] + panel * kLatentPanelBytes + at * 128, k_map, panel * 64,
                      copies.Row(first + at), &s.tail);
    }
    hopper::Wait(&s.tail, 0);
    ZeroRows(s.k[stage], job.end - first);
    if (lane < kParts) hopper::Arrive(&s.k_full[stage][lane]);
  };
  const int tiles = (job.end - job.begin + kKeyTile - 1) / kKeyTile;
  // The kernel ahead may still write what is not older than the step.
  const int old = max(min(job.old, job.end) - job.begin, 0) / kKeyTile;
  const int early = min(old, kLatentStages);
  for (int i = 0; i < early; ++i) copy(i);
  WaitForPrevious();
  if (lane == 0) {
    hopper::ArriveExpecting(&s.q_full,
                            shape.heads_per_tile * shape.tokens_per_tile * kPanels * 128);
    for (int panel = 0; panel < kPanels; ++panel) {
      hopper::CopyBox(s.q + panel * kLatentPanelBytes, q_map, panel * 64, first_head, job.token,
                      &s.q_full);
    }
  }
  __syncwarp();
  for (int i = early; i < tiles; ++i) copy(i);
}

#endif  // sm_90a

}  // namespace tokenspeed
