// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/moe.h"

#include <cstring>

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

namespace tokenspeed::cpu {
namespace {

// Pairs of (token, chosen expert), sorted by expert; a pair's place is its row in the products.
struct Sorted {
  int64_t num_pairs;
  int64_t num_active;     // experts that any token chose
  int32_t* row_of;        // [num_pairs], in the order of `chosen`
  int32_t* token_of_row;  // [num_pairs]
  int32_t* active;        // [num_active]
  int32_t* first_row;     // [num_active + 1]
  int32_t* next_row;      // [num_experts], while sorting
  int64_t* task_ends;     // [num_active]
  LinearArgs* groups;     // [num_active]
};

Sorted Carve(const ExpertsArgs& args) {
  const int64_t num_pairs = args.num_tokens * args.top_k;
  const int64_t most = num_pairs < args.num_experts ? num_pairs : args.num_experts;
  const size_t bytes = most * (sizeof(LinearArgs) + sizeof(int64_t) + sizeof(int32_t)) +
                       (most + 1 + 2 * num_pairs + args.num_experts) * sizeof(int32_t);
  auto* const memory = static_cast<uint8_t*>(Scratch(ScratchSlot::kPlan, bytes));
  Sorted sorted{};
  sorted.num_pairs = num_pairs;
  sorted.groups = reinterpret_cast<LinearArgs*>(memory);
  sorted.task_ends = reinterpret_cast<int64_t*>(sorted.groups + most);
  sorted.active = reinterpret_cast<int32_t*>(sorted.task_ends + most);
  sorted.first_row = sorted.active + most;
  sorted.next_row = sorted.first_row + most + 1;
  sorted.row_of = sorted.next_row + args.num_experts;
  sorted.token_of_row = sorted.row_of + num_pairs;
  return sorted;
}

// A counting sort: rows of one expert keep the order of their tokens.
Sorted Sort(const ExpertsArgs& args) {
  Sorted sorted = Carve(args);
  std::memset(sorted.next_row, 0, args.num_experts * sizeof(int32_t));
  for (int64_t i = 0; i < sorted.num_pairs; ++i) ++sorted.next_row[args.chosen[i]];
  int32_t row = 0;
  for (int64_t expert = 0; expert < args.num_experts; ++expert) {
    const int32_t count = sorted.next_row[expert];
    sorted.next_row[expert] = row;
    if (count == 0) continue;
    sorted.active[sorted.num_active] = static_cast<int32_t>(expert);
    sorted.first_row[sorted.num_active++] = row;
    row += count;
  }
  sorted.first_row[sorted.num_active] = row;
  for (int64_t i = 0; i < sorted.num_pairs; ++i) {
    const int32_t at = sorted.next_row[args.chosen[i]]++;
    sorted.row_of[i] = at;
    sorted.token_of_row[at] = static_cast<int32_t>(i / args.top_k);
  }
  return sorted;
}

// Rows of one product: where they come from, where they go, and the bias of expert 0.
struct Rows {
  const float* x;
  int64_t x_stride;
  const float* bias;
  int64_t bias_stride;
  float* out;
  int64_t out_stride;
};

void Multiply(const KernelTable& table, const Sorted& sorted, const ExpertMatrix& matrix,
              const Rows& rows) {
  for (int64_t i = 0; i < sorted.num_active; ++i) {
    const int64_t expert = sorted.active[i];
    const int64_t first = sorted.first_row[i];
    sorted.groups[i] = {
        .x = rows.x + first * rows.x_stride,
        .x_stride = rows.x_stride,
        .weight = matrix.data + expert * matrix.expert_bytes,
        .format = matrix.format,
        .num_tokens = sorted.first_row[i + 1] - first,
        .n = matrix.num_rows,
        .k = matrix.num_columns,
        .bias = rows.bias == nullptr ? nullptr : rows.bias + expert * rows.bias_stride,
        .out = rows.out + first * rows.out_stride,
        .out_stride = rows.out_stride,
    };
  }
  table.grouped_linear({sorted.groups, sorted.num_active, sorted.task_ends});
}

struct Gather {
  const ExpertsArgs& args;
  const Sorted& sorted;
};

void GatherRows(void* context, int64_t begin, int64_t end) {
  const Gather& gather = *static_cast<const Gather*>(context);
  const int64_t hidden = gather.args.gate_up[0].num_columns;
  for (int64_t row = begin; row < end; ++row) {
    const float* const x = gather.args.x + gather.sorted.token_of_row[row] * gather.args.x_stride;
    std::memcpy(gather.args.hidden_rows + row * hidden, x, hidden * sizeof(float));
  }
}

}  // namespace

void RunExperts(const KernelTable& table, const ExpertsArgs& args) {
  const Sorted sorted = Sort(args);
  Gather gather{args, sorted};
  ThreadPool::Global().ParallelFor(sorted.num_pairs, 16, &GatherRows, &gather);

  const int64_t hidden = args.gate_up[0].num_columns;
  const int64_t inner = args.down.num_columns;
  int64_t first_column = 0;
  for (int64_t part = 0; part < args.num_parts; ++part) {
    const float* const bias = args.gate_up_bias;
    Multiply(table, sorted, args.gate_up[part],
             {.x = args.hidden_rows,
              .x_stride = hidden,
              .bias = bias == nullptr ? nullptr : bias + first_column,
              .bias_stride = 2 * inner,
              .out = args.gate_up_rows + first_column,
              .out_stride = 2 * inner});
    first_column += args.gate_up[part].num_rows;
  }
  const GatedArgs gated{.x = args.gate_up_rows,
                        .x_stride = 2 * inner,
                        .num_tokens = sorted.num_pairs,
                        .width = inner,
                        .alpha = args.alpha,
                        .limit = args.limit,
                        .out = args.gate_up_rows,
                        .out_stride = 2 * inner};
  args.clamped ? table.clamped_swiglu(gated) : table.silu_and_mul(gated);
  Multiply(table, sorted, args.down,
           {.x = args.gate_up_rows,
            .x_stride = 2 * inner,
            .bias = args.down_bias,
            .bias_stride = args.down.num_rows,
            .out = args.hidden_rows,
            .out_stride = args.down.num_rows});
  table.weighted_sum({.rows = args.hidden_rows,
                      .row_of = sorted.row_of,
                      .weights = args.weights,
                      .num_tokens = args.num_tokens,
                      .top_k = args.top_k,
                      .width = args.down.num_rows,
                      .out = args.out});
}

}  // namespace tokenspeed::cpu
