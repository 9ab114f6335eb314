// SPDX-License-Identifier: MIT
//
// How one attention call is cut into items for the thread pool, and the softmax state that items
// leave behind. The cut decides who works, never what is computed: see attention.h. Runs on the
// caller's thread; memory is the caller's scratch.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_PLAN_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_PLAN_H_

#include <cstdint>

#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"

namespace tokenspeed::cpu {

// Keys of one split: the unit in which a long context is shared between threads.
constexpr int64_t kSplitTokens = 128;
// Queries times heads of one item, so that a tile of transposed keys is used often enough.
constexpr int64_t kItemRows = 48;

// Softmax over some keys, for `rows` lane rows: the largest score, the sum of weights, and the
// weighted values before division.
struct SoftmaxState {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* out;  // [rows, value_dim]
};

constexpr int64_t PaddedRows(int64_t rows) { return (rows + 15) / 16 * 16; }
constexpr int64_t StateFloats(int64_t rows, int64_t value_dim) {
  return 2 * PaddedRows(rows) + rows * value_dim;
}
inline __attribute__((always_inline)) SoftmaxState StateAt(float* memory, int64_t rows) {
  return {memory, memory + PaddedRows(rows), memory + 2 * PaddedRows(rows)};
}

// How many query heads that share one KV head go through it together: a divisor of num_heads, such
// that the groups give threads enough items.
int64_t LatentGroup(int64_t num_heads);

// Attention over all rows on the process's pool, with the kernels of `table`.
void PagedAttention(const KernelTable& table, const AttentionArgs& args);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_PLAN_H_
