// SPDX-License-Identifier: MIT
//
// Plans the decode rows of a step, once for all its layers: which rows read the same blocks first,
// and how every row's keys are cut so that all cores have as much to read.
//
// A block finds for its row the first row whose table begins with the same block, and how many
// tokens the two tables have in common. The block that comes last makes the plan: of a leader's
// rows, those that share the length which saves most become a group; their common keys are read
// once for all. What is left of each row is cut into parts of one length, the least that gives no
// more parts than fit on the cores at once and none that takes longer to add up than it saves. Does
// not let the next kernel start before it has ended, so every later kernel of the step may read
// plan, tables and lengths at once. Launched by attention/cuda_plan.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/decode_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kPlanThreads = 256;
constexpr int kMostRows = 1024;
constexpr int kLeastShared = 256;     // tokens that are worth a group
constexpr int kSharedPart = 256;      // keys of a group's part, at least
constexpr int kMostSharedParts = 16;  // of a group
constexpr int kMostOwnParts = 64;     // of a row
constexpr int kLongPart = 4;          // tiles of keys of a part that may be cut again
constexpr int kWaves = 3;             // parts, if they are long, to those that run at once

struct PlanShape {
  int num_rows;
  int block_size;
  int slots;          // row parts that run at once
  int rows_per_tile;  // of a group; 0: no groups
  int most_shared;    // items of groups
  int least_saved;    // tokens that a group must read less
  float least_share;  // a part has at least the root of this times the longest row's tiles
  int64_t table_stride;
};

struct PlanShared {
  unsigned long long best[kMostRows];  // of a leader: tokens saved, and the length that saves them
  int leader[kMostRows];
  int common[kMostRows];
  int start[kMostRows];    // where a row's own keys begin
  int own[kMostRows];      // how many there are
  int members[kMostRows];  // of a leader's group
  int parts[kMostRows];    // of a row's own keys
  int before[kMostRows];   // parts of its group's
  int shared_parts;        // of a group, at most
  int scratch[kPlanThreads / 32];
  bool last;
};

enum class Fold { kSum, kMin, kMax };

template <Fold FOLD>
__device__ inline int BlockFold(int value, int* scratch) {
  const auto fold = [](int x) {
    if (FOLD == Fold::kSum) return __reduce_add_sync(0xffffffffu, x);
    if (FOLD == Fold::kMin) return __reduce_min_sync(0xffffffffu, x);
    return __reduce_max_sync(0xffffffffu, x);
  };
  value = fold(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  return fold(scratch[threadIdx.x & (kPlanThreads / 32 - 1)] *
              (FOLD != Fold::kSum || (threadIdx.x & 31) < kPlanThreads / 32));
}

__device__ inline int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Whole blocks that hold nothing of this step's token.
__device__ inline int OldBlocks(int kv_len, int block_size) { return (kv_len - 1) / block_size; }

__device__ inline void CompareRow(const int* tables, const int* kv_lens, const PlanShape& shape,
                                  const DecodePlan& plan, PlanShared& s) {
  const int row = blockIdx.x;
  const int* table = tables + row * shape.table_stride;
  const int old = OldBlocks(kv_lens[row], shape.block_size);
  int leader = row, common = 0;
  if (shape.rows_per_tile > 0 && old > 0) {
    const int first = table[0];
    for (int other = threadIdx.x; other < row; other += kPlanThreads) {
      if (OldBlocks(kv_lens[other], shape.block_size) > 0 &&
          tables[other * shape.table_stride] == first) {
        leader = other;
        break;
      }
    }
    leader = BlockFold<Fold::kMin>(leader, s.scratch);
    const int* model = tables + leader * shape.table_stride;
    int same = min(old, OldBlocks(kv_lens[leader], shape.block_size));
    for (int column = threadIdx.x; column < same; column += kPlanThreads) {
      if (table[column] != model[column]) same = column;
    }
    same = BlockFold<Fold::kMin>(same, s.scratch);
    common = same * shape.block_size / kKeyTile * kKeyTile;
  }
  if (threadIdx.x == 0) {
    plan.leader[row] = leader;
    plan.common[row] = common;
  }
}

// Which rows share how much: s.start.
__device__ inline void FormGroups(const int* kv_lens, const PlanShape& shape, PlanShared& s) {
  const int rows = shape.num_rows;
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) s.best[row] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) {
    const int leader = s.leader[row], common = s.common[row];
    if (leader == row || common < kLeastShared) continue;
    int others = -1;
    for (int i = 0; i < rows; ++i) others += s.leader[i] == leader && s.common[i] >= common;
    const unsigned long long saved = static_cast<unsigned long long>(others) * common;
    if (saved >= shape.least_saved) atomicMax(&s.best[leader], saved << 24 | common);
  }
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) {
    const int length = static_cast<int>(s.best[s.leader[row]] & 0xffffff);
    s.start[row] = s.common[row] >= length ? length : 0;
    s.own[row] = kv_lens[row] - s.start[row];
  }
  __syncthreads();
}

__device__ inline int SharedShare(int length, const PlanShared& s) {
  return max(kSharedPart, CeilDiv(CeilDiv(length, s.shared_parts), kKeyTile) * kKeyTile);
}
__device__ inline int SharedParts(int length, const PlanShared& s) {
  return length > 0 ? CeilDiv(length, SharedShare(length, s)) : 0;
}

// Writes the groups' items; returns how many there are.
__device__ inline int WriteGroups(const PlanShape& shape, const DecodePlan& plan, PlanShared& s) {
  const int rows = shape.num_rows;
  if (shape.rows_per_tile == 0) return 0;
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) {
    if (s.start[row] == 0) continue;
    int place = 0, members = 0;
    for (int i = 0; i < rows; ++i) {
      if (s.start[i] == 0) continue;
      place += s.leader[i] < s.leader[row] || (s.leader[i] == s.leader[row] && i < row);
      members += s.leader[i] == s.leader[row];
    }
    plan.members[place] = row;
    if (s.leader[row] == row) {
      s.members[row] = members;
      s.common[row] = place;  // no longer needed as it was
    }
  }
  __syncthreads();
  const auto leads = [&](int row) { return s.start[row] > 0 && s.leader[row] == row; };
  const auto tiles = [&](int leader) { return CeilDiv(s.members[leader], shape.rows_per_tile); };
  int mine = 0;
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) mine += leads(row) ? tiles(row) : 0;
  const int all = BlockFold<Fold::kSum>(mine, s.scratch);
  if (threadIdx.x == 0) {
    s.shared_parts = min(max(shape.most_shared / max(all, 1), 1), kMostSharedParts);
  }
  __syncthreads();
  const auto items = [&](int leader) { return tiles(leader) * SharedParts(s.start[leader], s); };
  mine = 0;
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) {
    if (!leads(row)) continue;
    int at = 0;
    for (int i = 0; i < row; ++i) at += leads(i) ? items(i) : 0;
    mine += items(row);
    const int length = s.start[row], share = SharedShare(length, s);
    for (int first = 0; first < s.members[row]; first += shape.rows_per_tile) {
      const int count = min(shape.rows_per_tile, s.members[row] - first);
      for (int part = 0; part < SharedParts(length, s); ++part) {
        plan.items[at++] = SharedItem(s.common[row] + first, part * share,
                                      min((part + 1) * share, length), part, count);
      }
    }
  }
  return BlockFold<Fold::kSum>(mine, s.scratch);
}

__device__ inline int PartsAt(int share, const PlanShape& shape, PlanShared& s) {
  int parts = 0;
  for (int row = threadIdx.x; row < shape.num_rows; row += kPlanThreads) {
    parts += CeilDiv(s.own[row], share);
  }
  return BlockFold<Fold::kSum>(parts, s.scratch);
}

// Keys of a part of rows' own keys: as few as leave no more parts than run at once. Where some
// would still be read when most are done, or groups leave room early, parts are shorter and more,
// and the cores take them as they come free.
__device__ inline int ChooseShare(int shared_items, const PlanShape& shape, PlanShared& s) {
  int longest = 1, total = 0;
  for (int row = threadIdx.x; row < shape.num_rows; row += kPlanThreads) {
    longest = max(longest, s.own[row]);
    total += CeilDiv(s.own[row], kKeyTile);
  }
  longest = CeilDiv(BlockFold<Fold::kMax>(longest, s.scratch), kKeyTile);
  total = BlockFold<Fold::kSum>(total, s.scratch);
  const auto least_for = [&](int parts, int low) {  // tiles of a part that give no more parts
    int high = max(longest, low);
    while (low < high) {
      const int middle = (low + high) / 2;
      if (PartsAt(middle * kKeyTile, shape, s) <= parts) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  };
  const int worth = static_cast<int>(sqrtf(shape.least_share * longest));
  const int least = max(CeilDiv(longest, kMostOwnParts), worth);
  const int slots = max(shape.slots - shared_items, 0);
  const int at_once = max(slots, shape.num_rows);
  int tiles = least_for(at_once, least);
  const bool even = tiles * at_once * 5 <= total * 7 && shared_items == 0;
  if (tiles > kLongPart && !even) {
    tiles = least_for(max(kWaves * slots, shape.num_rows + slots), max(least, kLongPart));
  }
  return tiles * kKeyTile;
}

__device__ inline void MakePlan(const int* kv_lens, const PlanShape& shape, const DecodePlan& plan,
                                PlanShared& s) {
  const int rows = shape.num_rows;
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) {
    s.leader[row] = __ldcg(plan.leader + row);
    s.common[row] = __ldcg(plan.common + row);
  }
  __syncthreads();
  FormGroups(kv_lens, shape, s);
  const int shared_items = WriteGroups(shape, plan, s);
  const int share = ChooseShare(shared_items, shape, s);
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) {
    s.parts[row] = CeilDiv(s.own[row], share);
    s.before[row] = SharedParts(s.start[row], s);
  }
  __syncthreads();
  int mine = 0;
  for (int row = threadIdx.x; row < rows; row += kPlanThreads) {
    int at = shared_items, base = 0;
    for (int i = 0; i < row; ++i) {
      at += s.parts[i];
      base += s.parts[i] + s.before[i];
    }
    const int before = s.before[row], parts = s.parts[row];
    plan.base[row] = base;
    plan.parts[row] = before + parts;
    mine += parts;
    const int end = s.start[row] + s.own[row];
    for (int part = 0; part < parts; ++part) {
      const int begin = s.start[row] + part * share;
      plan.items[at++] = OwnItem(row, begin, min(begin + share, end), before + part);
    }
  }
  const int own_items = BlockFold<Fold::kSum>(mine, s.scratch);
  if (threadIdx.x == 0) *plan.count = shared_items + own_items;
}

}  // namespace tokenspeed

extern "C" __global__ void __launch_bounds__(256)
    decode_plan(const int* tables, const int* kv_lens, int* memory, int* counter,
                const tokenspeed::PlanShape shape) {
  using namespace tokenspeed;
  __shared__ PlanShared s;
  const DecodePlan plan(memory, shape.num_rows);
  WaitForPrevious();
  CompareRow(tables, kv_lens, shape, plan, s);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) s.last = atomicAdd(counter, 1) == shape.num_rows - 1;
  __syncthreads();
  if (!s.last) return;
  __threadfence();
  MakePlan(kv_lens, shape, plan, s);
  if (threadIdx.x == 0) *counter = 0;
  __threadfence();
}
