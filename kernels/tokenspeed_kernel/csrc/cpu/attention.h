// SPDX-License-Identifier: MIT
//
// Paged causal attention with an online softmax (Milakov and Gimelshein, 2018). Keys are taken in
// tiles of kTileKeys absolute positions; tiles form splits of kSplitTokens. Each split starts a
// fresh softmax state and the states are folded in order, whether one thread walks all splits or
// many threads take one each. Masked positions add exact zeros. So a query's result depends on its
// own row only.
//
// A tile's keys are transposed into panels once and serve all queries and heads of the item; scores
// and values then run through the same register tiles as linear layers. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/attention_plan.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/attention_softmax.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/linear.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/transpose.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

// Register tiles: rows x panels of keys, and rows x vectors of values. What is added up, a value
// and a weight must fit the registers together, which AVX2 has no room for in 3 x 2.
#if defined(__AVX512F__)
constexpr int kScoreRows = 6, kScorePanels = 4;
constexpr int kValueRows = 6, kValueVecs = 4;
#elif defined(__AVX2__)
constexpr int kScoreRows = 3, kScorePanels = 2;
constexpr int kValueRows = 6, kValueVecs = 1;
#else
constexpr int kScoreRows = 3, kScorePanels = 1;
constexpr int kValueRows = 3, kValueVecs = 1;
#endif

// The scratch of one item. A "lane row" is one query of one head: query-major, heads of the group
// inner.
struct AttentionScratch {
  float* keys;         // [kKeyPanels][head_dim][16], transposed
  float* q;            // [rows][head_dim], scaled
  float* scores;       // [rows][kTileKeys]
  SoftmaxState tile;   // of the split being walked
  SoftmaxState total;  // of the splits folded so far
  float* key_rows;     // [kTileKeys][head_dim], the tile's keys as floats when the cache has others
  float* value_rows;   // the same of its values
  const float* key_at[kTileKeys];
  const float* value_at[kTileKeys];
};

TS_INLINE SoftmaxState CarveState(float** next, int64_t rows, int64_t value_dim) {
  SoftmaxState state = StateAt(*next, rows);
  *next += StateFloats(rows, value_dim);
  return state;
}

TS_INLINE void ClearState(const SoftmaxState& state, int64_t rows, int64_t value_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    state.max[r] = kNegInf;
    state.sum[r] = 0.0f;
  }
  for (int64_t i = 0; i < rows * value_dim; i += kLanes) Store(state.out + i, Zero());
}

// One head of one cached token as floats.
TS_INLINE void DecodeRow(KvFormat format, const uint8_t* from, float scale, int64_t head_dim,
                         float* to) {
  if (format == KvFormat::kFp8) {
    const Vec factor = Broadcast(scale * kFp8Unit);
    for (int64_t i = 0; i < head_dim; i += kLanes) Store(to + i, Mul(LoadFp8(from + i), factor));
  } else {
    const auto* const halves = reinterpret_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < head_dim; i += kLanes) Store(to + i, LoadBfloat16(halves + i));
  }
}

// The cached row of a head at `offset` of a block, which starts at element `block_at`: where it
// lies, or decoded into `buffer`.
TS_INLINE const float* RowOf(const AttentionArgs& args, const uint8_t* cache, const float* scales,
                             int64_t block_at, int64_t head, int64_t block, int64_t offset,
                             float* buffer) {
  const int64_t at = block_at + head * args.kv_head_stride + offset * args.head_dim;
  const uint8_t* const row = cache + at * KvBytes(args.format);
  if (args.format == KvFormat::kF32) return reinterpret_cast<const float*>(row);
  const int64_t index = (block * args.num_kv_heads + head) * args.block_size + offset;
  DecodeRow(args.format, row, scales == nullptr ? 1.0f : scales[index], args.head_dim, buffer);
  return buffer;
}

// Where the keys and values of positions [first, first + count) lie. Missing ones repeat the last:
// their scores are masked.
TS_INLINE void Locate(const AttentionArgs& args, const AttentionItem& item, int64_t first,
                      int64_t count, AttentionScratch& scratch) {
  const int32_t* const table = args.block_tables + item.row * args.table_stride;
  int64_t block = first / args.block_size;
  int64_t offset = first % args.block_size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = table[block], decoded = i * args.head_dim;
    scratch.key_at[i] = RowOf(args, args.k_cache, args.k_scales, number * args.k_block_stride,
                              item.kv_head, number, offset, scratch.key_rows + decoded);
    // The value of a latent is a part of its key.
    scratch.value_at[i] =
        args.v_cache == args.k_cache
            ? scratch.key_at[i]
            : RowOf(args, args.v_cache, args.v_scales, number * args.v_block_stride, item.kv_head,
                    number, offset, scratch.value_rows + decoded);
    if (++offset == args.block_size) {
      offset = 0;
      ++block;
    }
  }
  for (int64_t i = count; i < kTileKeys; ++i) scratch.key_at[i] = scratch.key_at[count - 1];
}

// Keys and values that will be needed after the tile at hand: `count` positions of an item, maybe
// 0.
struct Upcoming {
  const AttentionItem* item;
  int64_t first, count;
};

// Asks for the share of `next` that falls to `step` of `num_steps`: spread out, requests neither
// fill the queue of cache misses nor hold up the work.
TS_INLINE void PrefetchShare(const AttentionArgs& args, const Upcoming& next, int64_t step,
                             int64_t num_steps) {
  const int64_t begin = next.first + next.count * step / num_steps;
  const int64_t end = next.first + next.count * (step + 1) / num_steps;
  for (int64_t position = begin; position < end; ++position) {
    const int32_t block =
        args.block_tables[next.item->row * args.table_stride + position / args.block_size];
    const int64_t at =
        next.item->kv_head * args.kv_head_stride + position % args.block_size * args.head_dim;
    const int64_t size = KvBytes(args.format);
    const uint8_t* const key = args.k_cache + (block * args.k_block_stride + at) * size;
    for (int64_t byte = 0; byte < args.head_dim * size; byte += 64) Prefetch(key + byte);
    if (args.v_cache == args.k_cache) continue;
    const uint8_t* const value = args.v_cache + (block * args.v_block_stride + at) * size;
    for (int64_t byte = 0; byte < args.value_dim * size; byte += 64) Prefetch(value + byte);
  }
}

TS_INLINE void TransposeKeys(const AttentionArgs& args, const AttentionScratch& scratch,
                             int64_t num_panels, const Upcoming& next) {
  const int64_t num_columns = args.head_dim / kLanes;
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    float* const out = scratch.keys + panel * args.head_dim * kLanes;
    for (int64_t column = 0; column < num_columns; ++column) {
      PrefetchShare(args, next, panel * num_columns + column, num_panels * num_columns);
      TransposeStore(scratch.key_at + panel * kLanes, column * kLanes,
                     out + column * kLanes * kLanes);
    }
  }
}

template <int kRows, int kPanels>
__attribute__((noinline)) void ScoreTile(const float* q, int64_t head_dim, const float* keys,
                                         float* scores) {
  const uint8_t* panels[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    panels[p] = reinterpret_cast<const uint8_t*>(keys + p * head_dim * kLanes);
  }
  Vec acc[kRows][kPanels];
  MultiplyTile<Format<WeightFormat::kF32>, kRows, kPanels>(q, head_dim, head_dim, panels, 64, 0,
                                                           acc);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) Store(scores + r * kTileKeys + p * kLanes, acc[r][p]);
  }
}

template <int kMost, int kPanels>
TS_INLINE void ScoreRows(int64_t rows, const float* q, int64_t head_dim, const float* keys,
                         float* scores) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return ScoreRows<kMost - 1, kPanels>(rows, q, head_dim, keys, scores);
  }
  ScoreTile<kMost, kPanels>(q, head_dim, keys, scores);
}

TS_INLINE void Scores(const AttentionScratch& scratch, int64_t rows, int64_t num_panels,
                      int64_t head_dim) {
  for (int64_t row = 0; row < rows; row += kScoreRows) {
    const float* const q = scratch.q + row * head_dim;
    float* const scores = scratch.scores + row * kTileKeys;
    int64_t panel = 0;
    for (; panel + kScorePanels <= num_panels; panel += kScorePanels) {
      ScoreRows<kScoreRows, kScorePanels>(rows - row, q, head_dim,
                                          scratch.keys + panel * head_dim * kLanes,
                                          scores + panel * kLanes);
    }
    for (; panel < num_panels; ++panel) {
      ScoreRows<kScoreRows, 1>(rows - row, q, head_dim, scratch.keys + panel * head_dim * kLanes,
                               scores + panel * kLanes);
    }
  }
}

template <int kRows, int kVecs>
__attribute__((noinline)) void ValueTile(const float* weights, const float* const* value_at,
                                         int64_t count, int64_t column, float* out,
                                         int64_t value_dim) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) acc[r][c] = Load(out + r * value_dim + c * kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    const float* const value = value_at[j] + column;
    Vec v[kVecs];
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) v[c] = Load(value + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Broadcast(weights[r * kTileKeys + j]);
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) acc[r][c] = Fma(weight, v[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) Store(out + r * value_dim + c * kLanes, acc[r][c]);
  }
}

template <int kMost, int kVecs>
TS_INLINE void ValueRows(int64_t rows, const float* weights, const float* const* value_at,
                         int64_t count, int64_t column, float* out, int64_t value_dim) {
  if constexpr (kMost > 1) {
    if (rows < kMost) {
      return ValueRows<kMost - 1, kVecs>(rows, weights, value_at, count, column, out, value_dim);
    }
  }
  ValueTile<kMost, kVecs>(weights, value_at, count, column, out, value_dim);
}

TS_INLINE void AddValues(const AttentionScratch& scratch, int64_t rows, int64_t count,
                         int64_t value_dim) {
  for (int64_t row = 0; row < rows; row += kValueRows) {
    const float* const weights = scratch.scores + row * kTileKeys;
    float* const out = scratch.tile.out + row * value_dim;
    int64_t column = 0;
    for (; column + kValueVecs * kLanes <= value_dim; column += kValueVecs * kLanes) {
      ValueRows<kValueRows, kValueVecs>(rows - row, weights, scratch.value_at, count, column,
                                        out + column, value_dim);
    }
    for (; column < value_dim; column += kLanes) {
      ValueRows<kValueRows, 1>(rows - row, weights, scratch.value_at, count, column, out + column,
                               value_dim);
    }
  }
}

// Absolute positions of the item's queries, the keys of its splits that any of them sees, and the
// tile that holds the first of these.
struct ItemRange {
  int64_t first_position;
  int64_t first_tile, key_end;
};

TS_INLINE ItemRange RangeOf(const AttentionArgs& args, const AttentionItem& item) {
  const int64_t query_len = args.query_start[item.row + 1] - args.query_start[item.row];
  const int64_t first = args.kv_lens[item.row] - query_len + item.first_query;
  const int64_t oldest = args.window > 0 ? first - args.window + 1 : 0;
  const int64_t begin = item.first_split * kSplitTokens;
  const int64_t end = (item.first_split + item.num_splits) * kSplitTokens;
  const int64_t seen_end = first + item.num_queries;
  return {first, (oldest > begin ? oldest : begin) / kTileKeys * kTileKeys,
          seen_end < end ? seen_end : end};
}

TS_INLINE void LoadQueries(const AttentionArgs& args, const AttentionItem& item,
                           const AttentionScratch& scratch) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t token = args.query_start[item.row] + item.first_query;
  const Vec scale = Broadcast(args.scale);
  float* out = scratch.q;
  for (int64_t query = 0; query < item.num_queries; ++query) {
    // Heads of one group lie side by side.
    const float* const q =
        args.q + (token + query) * args.q_stride + item.kv_head * group * args.head_dim;
    for (int64_t i = 0; i < group * args.head_dim; i += kLanes, out += kLanes) {
      Store(out, Mul(Load(q + i), scale));
    }
  }
}

TS_INLINE void WalkTile(const AttentionArgs& args, const AttentionItem& item,
                        const ItemRange& range, int64_t tile_begin, const Upcoming& next,
                        AttentionScratch& scratch) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t rows = item.num_queries * group;
  const int64_t left = range.key_end - tile_begin;
  const int64_t count = left < kTileKeys ? left : kTileKeys;
  const int64_t num_panels = (count + kLanes - 1) / kLanes;
  Locate(args, item, tile_begin, count, scratch);
  TransposeKeys(args, scratch, num_panels, next);
  Scores(scratch, rows, num_panels, args.head_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = range.first_position + row / group;
    int64_t high = position + 1 - tile_begin;
    int64_t low = args.window > 0 ? position - args.window + 1 - tile_begin : 0;
    if (low < 0) low = 0;
    if (high > count) high = count;
    if (args.softcap > 0.0f) CapRow(scratch.scores + row * kTileKeys, num_panels, args.softcap);
    SoftmaxRow(scratch.scores + row * kTileKeys, num_panels, low, high, scratch.tile, row,
               args.value_dim);
  }
  AddValues(scratch, rows, count, args.value_dim);
}

TS_INLINE void Finish(const AttentionArgs& args, const AttentionItem& item,
                      const SoftmaxState& state) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t token = args.query_start[item.row] + item.first_query;
  for (int64_t query = 0; query < item.num_queries; ++query) {
    for (int64_t head = 0; head < group; ++head) {
      const int64_t row = query * group + head;
      float* const out =
          args.out +
          ((token + query) * args.num_heads + item.kv_head * group + head) * args.value_dim;
      const float* const sink =
          args.sinks == nullptr ? nullptr : args.sinks + item.kv_head * group + head;
      const Vec inverse = Broadcast(InverseSum(state, row, sink));
      for (int64_t i = 0; i < args.value_dim; i += kLanes) {
        Store(out + i, Mul(Load(state.out + row * args.value_dim + i), inverse));
      }
    }
  }
}

// What follows the tile at `tile_begin`: the item's next tile, else the first one of the item after
// it.
TS_INLINE Upcoming After(const AttentionArgs& args, const AttentionItem& item,
                         const ItemRange& range, int64_t tile_begin,
                         const AttentionItem* next_item) {
  int64_t first = tile_begin + kTileKeys;
  int64_t end = range.key_end;
  const AttentionItem* owner = &item;
  if (first >= end) {
    if (next_item == nullptr) return {&item, 0, 0};
    const ItemRange next = RangeOf(args, *next_item);
    owner = next_item;
    first = next.first_tile;
    end = next.key_end;
  }
  const int64_t left = end - first;
  return {owner, first, left < kTileKeys ? (left > 0 ? left : 0) : kTileKeys};
}

void AttendItem(const AttentionArgs& args, const AttentionItem& item,
                const AttentionItem* next_item) {
  const int64_t rows = item.num_queries * (args.num_heads / args.num_kv_heads);
  const int64_t head_dim = args.head_dim, value_dim = args.value_dim;
  const int64_t state_floats = StateFloats(rows, value_dim);
  const int64_t key_floats = kTileKeys * head_dim;
  const int64_t decoded_floats = args.format == KvFormat::kF32 ? 0 : key_floats;
  const int64_t floats =
      key_floats + 2 * decoded_floats + rows * (head_dim + kTileKeys) + 2 * state_floats;
  auto* next = static_cast<float*>(Scratch(ScratchSlot::kAttention, floats * sizeof(float)));
  AttentionScratch scratch;
  scratch.keys = next;
  scratch.key_rows = scratch.keys + key_floats;
  scratch.value_rows = scratch.key_rows + decoded_floats;
  scratch.q = scratch.value_rows + decoded_floats;
  scratch.scores = scratch.q + rows * head_dim;
  next = scratch.scores + rows * kTileKeys;
  scratch.tile = CarveState(&next, rows, value_dim);
  scratch.total = CarveState(&next, rows, value_dim);
  if (item.partial != nullptr) scratch.tile = StateAt(item.partial, rows);

  const ItemRange range = RangeOf(args, item);
  LoadQueries(args, item, scratch);
  ClearState(scratch.total, rows, value_dim);
  for (int32_t split = item.first_split; split < item.first_split + item.num_splits; ++split) {
    ClearState(scratch.tile, rows, value_dim);
    const int64_t split_begin = split * kSplitTokens;
    const int64_t first_tile = split_begin > range.first_tile ? split_begin : range.first_tile;
    const int64_t split_end =
        split_begin + kSplitTokens < range.key_end ? split_begin + kSplitTokens : range.key_end;
    for (int64_t tile = first_tile; tile < split_end; tile += kTileKeys) {
      WalkTile(args, item, range, tile, After(args, item, range, tile, next_item), scratch);
    }
    if (item.partial == nullptr) Fold(scratch.tile, scratch.total, rows, value_dim);
  }
  if (item.partial == nullptr) Finish(args, item, scratch.total);
}

// Folds the partial states that item.partial starts, one a split, and writes the item's output.
void CombineItem(const AttentionArgs& args, const AttentionItem& item, int64_t num_partials) {
  const int64_t rows = item.num_queries * (args.num_heads / args.num_kv_heads);
  const int64_t state_floats = StateFloats(rows, args.value_dim);
  auto* const memory = static_cast<float*>(
      Scratch(ScratchSlot::kAttention, static_cast<size_t>(state_floats) * sizeof(float)));
  const SoftmaxState total = StateAt(memory, rows);
  ClearState(total, rows, args.value_dim);
  for (int64_t i = 0; i < num_partials; ++i) {
    Fold(StateAt(item.partial + i * state_floats, rows), total, rows, args.value_dim);
  }
  Finish(args, item, total);
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_H_
