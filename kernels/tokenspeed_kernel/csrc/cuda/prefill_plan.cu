// SPDX-License-Identifier: MIT
//
// Plans the rows of a step that have many queries, once for all its layers.
//
// One block: finds how many tiles of queries each row has, how many tiles of keys each of those
// sees, and, where there are too few to keep the cores busy to the end, into how many pieces to cut
// the keys; jobs are ordered by length, the longest first. Does not let the next kernel start
// before it has ended, so every later kernel of the step may read the plan at once. Launched by
// attention/cuda_plan.py.
#include <stdint.h>

#include "kernels/tokenspeed_kernel/csrc/cuda/prefill_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kThreads = 1024;
constexpr int kMostRows = 1024;
constexpr int kMostSorted = 4096;  // tiles; more are left in the order of rows
constexpr int kMostPieces = 8;
constexpr int kJobCost = 2;  // what a job costs besides its tiles of keys, in tiles

struct PrefillPlanShape {
  int num_rows;
  int first_row;
  int tokens_per_tile;
  int num_jobs;  // of the same queries, for different heads
  int num_cores;
  int most_pieces;  // jobs, if any is cut, that there is memory for; 0: nothing is cut
};

struct PlanShared {
  int first[kMostRows + 1];  // tile of a row among all
  int cost[kMostSorted];     // tiles of keys; in the end those of a piece, and the pieces above
  int scratch[kThreads / 32];
  int longest;
};

__device__ inline int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// The sum over all threads, in all.
__device__ inline int BlockTotal(int value, int* scratch) {
  value = __reduce_add_sync(0xffffffffu, value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  return __reduce_add_sync(0xffffffffu, scratch[threadIdx.x & 31]);
}

struct Tile {
  int row;
  int skipped;
  int cost;
};

__device__ inline Tile TileAt(int index, const int* query_start, const int* kv_lens,
                              const PrefillPlanShape& shape, const PlanShared& s) {
  int low = 0, high = shape.num_rows;  // the last row whose first tile is not past `index`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.first[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  Tile tile;
  tile.row = low + shape.first_row;
  tile.skipped = (index - s.first[low]) * shape.tokens_per_tile;
  const int queries = query_start[tile.row + 1] - query_start[tile.row];
  const int kv_len = kv_lens[tile.row];
  const int end = min(kv_len - queries + tile.skipped + shape.tokens_per_tile, kv_len);
  tile.cost = CeilDiv(end, kPrefillKeys);
  return tile;
}

// Tiles of keys that a job has at most: cutting them is worth it where the last jobs would leave
// many cores idle.
__device__ inline int ChooseLongest(int num_tiles, const PrefillPlanShape& shape, PlanShared& s) {
  const int longest = s.longest;
  int best = longest, least = 0x7fffffff;
  for (int cuts = 1; cuts <= kMostPieces; ++cuts) {
    const int most = CeilDiv(longest, cuts);
    int jobs = 0, tiles = 0;
    for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
      jobs += CeilDiv(s.cost[i], most);
      tiles += s.cost[i];
    }
    jobs = BlockTotal(jobs, s.scratch) * shape.num_jobs;
    tiles = BlockTotal(tiles, s.scratch) * shape.num_jobs;
    if (cuts > 1 && jobs > shape.most_pieces) break;
    const int overhead = kJobCost + (cuts > 1);
    const int waves = CeilDiv(jobs, shape.num_cores);
    const int time = max(most + overhead, CeilDiv(waves * tiles, jobs) + waves * overhead);
    if (time < least) {
      least = time;
      best = most;
    }
  }
  return max(best, 1);
}

__device__ inline void Write(const Tile& tile, int most, int at, int place, int cut,
                             PrefillJob* jobs) {
  const int pieces = CeilDiv(tile.cost, most), each = CeilDiv(tile.cost, pieces);
  for (int piece = 0; piece < pieces; ++piece) {
    jobs[at + piece] = {tile.row, tile.skipped, piece * each, min((piece + 1) * each, tile.cost),
                        piece,    pieces,       place,        cut};
  }
}

}  // namespace tokenspeed

extern "C" __global__ void __launch_bounds__(1024)
    prefill_plan(const int* query_start, const int* kv_lens, int* plan,
                 const tokenspeed::PrefillPlanShape shape) {
  using namespace tokenspeed;
  __shared__ PlanShared s;
  auto* jobs = reinterpret_cast<PrefillJob*>(plan + 4);
  WaitForPrevious();
  for (int row = threadIdx.x; row < shape.num_rows; row += kThreads) {
    const int at = row + shape.first_row;
    s.first[row + 1] = CeilDiv(query_start[at + 1] - query_start[at], shape.tokens_per_tile);
  }
  if (threadIdx.x == 0) s.first[0] = s.longest = 0;
  __syncthreads();
  int before = 0;  // rows are few
  for (int row = threadIdx.x; row < shape.num_rows; row += kThreads) {
    for (int i = 0; i <= row; ++i) before += s.first[i + 1];
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < shape.num_rows) s.first[threadIdx.x + 1] = before;
  __syncthreads();
  const int num_tiles = s.first[shape.num_rows];
  if (num_tiles > kMostSorted) {
    for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
      Write(TileAt(i, query_start, kv_lens, shape, s), 0x3fffffff, num_tiles - 1 - i, 0, 0, jobs);
    }
    if (threadIdx.x == 0) plan[0] = num_tiles;
    return __threadfence();
  }
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    s.cost[i] = TileAt(i, query_start, kv_lens, shape, s).cost;
    atomicMax(&s.longest, s.cost[i]);
  }
  __syncthreads();
  int most = 0x3fffffff;
  if (shape.most_pieces > 0) most = ChooseLongest(num_tiles, shape, s);
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    const int pieces = CeilDiv(s.cost[i], most);
    s.cost[i] = CeilDiv(s.cost[i], pieces) | pieces << 24;
  }
  __syncthreads();
  int mine = 0;
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    const int length = s.cost[i] & 0xffffff;
    int at = 0, place = 0, cut = 0;
    for (int other = 0; other < num_tiles; ++other) {
      const int pieces = s.cost[other] >> 24, its_length = s.cost[other] & 0xffffff;
      const bool ahead = its_length > length || (its_length == length && other < i);
      at += ahead ? pieces : 0;
      place += other < i && pieces > 1 ? pieces : 0;
      cut += other < i && pieces > 1;
    }
    Write(TileAt(i, query_start, kv_lens, shape, s), most, at, place, cut, jobs);
    mine += s.cost[i] >> 24;
  }
  mine = BlockTotal(mine, s.scratch);
  if (threadIdx.x == 0) plan[0] = mine;
  __threadfence();
}
