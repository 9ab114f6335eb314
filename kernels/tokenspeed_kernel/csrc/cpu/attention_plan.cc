// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/attention_plan.h"

#include <algorithm>

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

namespace tokenspeed::cpu {
namespace {

// What one row contributes: `num_tiles` items of up to `queries` queries a KV head, each walking
// all its splits; or, when one tile holds all queries and the context is long, one item a split.
struct RowCut {
  int64_t query_len, kv_len;
  int64_t queries, num_tiles;
  int64_t first_split, num_splits;

  bool IsSplit() const { return num_tiles == 1 && num_splits > 1; }
  int64_t ItemsPerHead() const { return IsSplit() ? num_splits : num_tiles; }
};

RowCut Cut(const AttentionArgs& args, int64_t row) {
  RowCut cut;
  cut.query_len = args.query_start[row + 1] - args.query_start[row];
  cut.kv_len = args.kv_lens[row];
  const int64_t group = args.num_heads / args.num_kv_heads;
  cut.queries = std::clamp<int64_t>(kItemRows / group, 1, std::max<int64_t>(cut.query_len, 1));
  cut.num_tiles = (cut.query_len + cut.queries - 1) / cut.queries;
  const int64_t oldest = args.window > 0 ? cut.kv_len - cut.query_len - args.window + 1 : 0;
  cut.first_split = std::max<int64_t>(oldest, 0) / kSplitTokens;
  cut.num_splits = (cut.kv_len + kSplitTokens - 1) / kSplitTokens - cut.first_split;
  return cut;
}

struct Combination {
  AttentionItem item;  // partial: the first of its states
  int64_t num_partials;
};

struct Plan {
  const KernelTable* table;
  const AttentionArgs* args;
  AttentionItem* items;
  int64_t num_items = 0;
  Combination* combinations;
  int64_t num_combinations = 0;
  float* partials;
};

struct PlanSize {
  int64_t items = 0, combinations = 0, partial_floats = 0;
};

PlanSize Measure(const AttentionArgs& args) {
  PlanSize size;
  const int64_t group = args.num_heads / args.num_kv_heads;
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const RowCut cut = Cut(args, row);
    size.items += cut.ItemsPerHead() * args.num_kv_heads;
    if (cut.IsSplit()) {
      size.combinations += args.num_kv_heads;
      size.partial_floats +=
          args.num_kv_heads * cut.num_splits * StateFloats(cut.query_len * group, args.value_dim);
    }
  }
  return size;
}

void AddSplits(Plan& plan, const RowCut& cut, AttentionItem item) {
  const int64_t rows = cut.query_len * (plan.args->num_heads / plan.args->num_kv_heads);
  const int64_t floats = StateFloats(rows, plan.args->value_dim);
  item.num_queries = static_cast<int32_t>(cut.query_len);
  item.partial = plan.partials;
  plan.combinations[plan.num_combinations++] = {item, cut.num_splits};
  item.num_splits = 1;
  for (int64_t split = 0; split < cut.num_splits; ++split) {
    item.first_split = static_cast<int32_t>(cut.first_split + split);
    item.partial = plan.partials;
    plan.partials += floats;
    plan.items[plan.num_items++] = item;
  }
}

void AddTiles(Plan& plan, const RowCut& cut, AttentionItem item) {
  // Late queries see most keys: they go first, so that no thread is left with a long item at the
  // end.
  for (int64_t tile = cut.num_tiles - 1; tile >= 0; --tile) {
    const int64_t first = tile * cut.queries;
    const int64_t count = std::min(cut.queries, cut.query_len - first);
    const int64_t key_end = cut.kv_len - cut.query_len + first + count;
    item.first_query = static_cast<int32_t>(first);
    item.num_queries = static_cast<int32_t>(count);
    item.first_split = static_cast<int32_t>(cut.first_split);
    item.num_splits =
        static_cast<int32_t>((key_end + kSplitTokens - 1) / kSplitTokens - cut.first_split);
    plan.items[plan.num_items++] = item;
  }
}

void RunItems(void* context, int64_t begin, int64_t end) {
  const Plan& plan = *static_cast<const Plan*>(context);
  for (int64_t i = begin; i < end; ++i) {
    const AttentionItem* const next = i + 1 < plan.num_items ? &plan.items[i + 1] : nullptr;
    plan.table->attention_item(*plan.args, plan.items[i], next);
  }
}

void RunCombinations(void* context, int64_t begin, int64_t end) {
  const Plan& plan = *static_cast<const Plan*>(context);
  for (int64_t i = begin; i < end; ++i) {
    const Combination& combination = plan.combinations[i];
    plan.table->attention_combine(*plan.args, combination.item, combination.num_partials);
  }
}

}  // namespace

int64_t LatentGroup(int64_t num_heads) {
  int64_t group = std::min(num_heads, kItemRows / 3);
  while (num_heads % group != 0) --group;
  return group;
}

void PagedAttention(const KernelTable& table, const AttentionArgs& args) {
  const PlanSize size = Measure(args);
  Plan plan{.table = &table,
            .args = &args,
            .items = nullptr,
            .combinations = nullptr,
            .partials = nullptr};
  const size_t item_bytes = size.items * sizeof(AttentionItem);
  auto* const memory = static_cast<uint8_t*>(
      Scratch(ScratchSlot::kPlan, item_bytes + size.combinations * sizeof(Combination)));
  plan.items = reinterpret_cast<AttentionItem*>(memory);
  plan.combinations = reinterpret_cast<Combination*>(memory + item_bytes);
  plan.partials =
      static_cast<float*>(Scratch(ScratchSlot::kPartials, size.partial_floats * sizeof(float)));
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const RowCut cut = Cut(args, row);
    if (cut.query_len == 0) continue;
    for (int64_t head = 0; head < args.num_kv_heads; ++head) {
      AttentionItem item{};
      item.row = static_cast<int32_t>(row);
      item.kv_head = static_cast<int32_t>(head);
      cut.IsSplit() ? AddSplits(plan, cut, item) : AddTiles(plan, cut, item);
    }
  }
  ThreadPool& pool = ThreadPool::Global();
  pool.ParallelFor(plan.num_items, 1, &RunItems, &plan);
  pool.ParallelFor(plan.num_combinations, 4, &RunCombinations, &plan);
}

}  // namespace tokenspeed::cpu
