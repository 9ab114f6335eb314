// SPDX-License-Identifier: MIT
//
// One item of a decode's plan that is a group's: one KV head and some of the keys that the rows of
// a group have in common, read once for all of them.
//
// The tile of 64 queries, rows times the heads of the KV head, stays in registers. The copy engine
// brings 16 keys and half of their values' columns at a time, one tile ahead, and comes again for
// the other half; the next keys are multiplied before the last values. Little shared memory and few
// registers are taken on purpose: the rows' own items need them for loads in flight. Keys of a
// group are whole tiles and older than the step, so they are asked for before the kernel ahead has
// ended. For Hopper alone.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/decode_own.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/decode_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/softmax.cuh"

namespace tokenspeed {

constexpr int kTileQueries = 64;
constexpr int kGroupKeys = 16;
constexpr int kGroupPanelBytes = kGroupKeys * 128;  // 64 columns
constexpr int kGroupStages = 3;

struct GroupShared {
  uint8_t k[kGroupStages][2 * kGroupPanelBytes];
  uint8_t v[kGroupStages][kGroupPanelBytes];
};

// What the rows of a group have in common, and which of it is this item's.
struct GroupItem {
  const int* members;
  int num_members;
  int begin;
  int end;
  int part;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Queries of the thread's two rows of the tile, as a product takes them; zeros past the last.
__device__ inline void LoadGroup(uint32_t (&query)[8][4], const __nv_bfloat16* q,
                                 const GroupItem& item, int kv_head, const DecodeShape& shape) {
  const int heads = shape.num_heads / shape.num_kv_heads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = (threadIdx.x >> 5) * 16 + (threadIdx.x & 31) / 4 + half * 8;
    const bool exists = place < item.num_members * heads;
    const int64_t row = exists ? item.members[place / heads] : 0;
    const __nv_bfloat16* from = q + row * shape.q_stride +
                                (kv_head * heads + place % heads) * kDecodeHead +
                                (threadIdx.x & 3) * 2;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        query[step][side * 2 + half] =
            exists ? *reinterpret_cast<const uint32_t*>(from + step * 16 + side * 8) : 0;
      }
    }
  }
}

__device__ inline void StartGroupScores(float (&scores)[8], const uint32_t (&query)[8][4],
                                        const uint8_t* k) {
  const uint64_t keys = hopper::Operand(k, 16, 1024);
  hopper::BeginProducts();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const int at = step / 4 * kGroupPanelBytes + step % 4 * 32;
    hopper::MultiplyRows(scores, query[step], hopper::Advance(keys, at), step > 0);
  }
  hopper::CommitProducts();
}

__device__ inline void StartGroupSums(float (&out)[32], const uint32_t (&weights)[4],
                                      const uint8_t* v) {
  hopper::BeginProducts();
  hopper::MultiplyRegisters(out, weights, hopper::Operand(v, kGroupPanelBytes, 1024), 1);
  hopper::CommitProducts();
}

// Brings the tiles of an item, those for the first half of the values' columns, then the others.
struct GroupCopies {
  const CUtensorMap* k_map;
  const CUtensorMap* v_map;
  const int* table;
  int begin;
  int tiles;
  int kv_head;
  int num_kv_heads;
  int block_size;

  // By one thread. Turn `i` counts through both halves.
  __device__ inline void Bring(int i, GroupShared& s, uint64_t (&full)[kGroupStages]) const {
    if (i >= 2 * tiles) return;
    const int stage = i % kGroupStages, half = i >= tiles;
    const int key = begin + (half ? i - tiles : i) * kGroupKeys;
    const int row =
        (table[key / block_size] * num_kv_heads + kv_head) * block_size + key % block_size;
    hopper::ArriveExpecting(&full[stage], 3 * kGroupPanelBytes);
    hopper::CopyBox(s.k[stage], k_map, 0, row, &full[stage]);
    hopper::CopyBox(s.k[stage] + kGroupPanelBytes, k_map, 64, row, &full[stage]);
    hopper::CopyBox(s.v[stage], v_map, half * 64, row, &full[stage]);
  }
};

// The group's sums of one half of the columns, in the layout of a product's result.
__device__ inline void GroupSums(const GroupCopies& copies, const uint32_t (&query)[8][4], int half,
                                 float scale, GroupShared& s, uint64_t (&full)[kGroupStages],
                                 float (&out)[32], Softmax& state) {
  float scores[8], shrink[2];
  uint32_t weights[1][4];
#pragma unroll
  for (int i = 0; i < 32; ++i) out[i] = 0.0f;
  int turn = half * copies.tiles;
  hopper::Wait(&full[turn % kGroupStages], turn / kGroupStages & 1);
  StartGroupScores(scores, query, s.k[turn % kGroupStages]);
  hopper::WaitProducts<0>();
  hopper::Pin(scores);
  Weigh(scores, state, scale, shrink);
  Round(scores, weights);
  for (int i = 0; i + 1 < copies.tiles; ++i, ++turn) {
    const int stage = turn % kGroupStages, next = (turn + 1) % kGroupStages;
    hopper::Wait(&full[next], (turn + 1) / kGroupStages & 1);
    StartGroupScores(scores, query, s.k[next]);
    Shrink(out, shrink);
    StartGroupSums(out, weights[0], s.v[stage]);
    hopper::WaitProducts<1>();
    hopper::Pin(scores);
    Weigh(scores, state, scale, shrink);
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    Round(scores, weights);
    __syncthreads();
    if (threadIdx.x == 0) copies.Bring(turn + kGroupStages, s, full);
  }
  Shrink(out, shrink);
  StartGroupSums(out, weights[0], s.v[turn % kGroupStages]);
  hopper::WaitProducts<0>();
  hopper::Pin(out);
  __syncthreads();
  if (threadIdx.x == 0) copies.Bring(turn + kGroupStages, s, full);
}

#endif  // sm_90a

}  // namespace tokenspeed
