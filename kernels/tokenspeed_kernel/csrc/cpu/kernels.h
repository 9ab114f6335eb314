// SPDX-License-Identifier: MIT
//
// The arguments of every CPU kernel and the table of kernels of one instruction set. module.cc
// fills the arguments from raw addresses and calls through `Kernels()`; kernels_<isa>.cc provide
// the tables. Sizes count elements; a stride counts elements from one token (or row) to the next.
// All floats are 32 bits. Nothing here is checked: the Python wrappers have checked shapes, dtypes
// and contiguity.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_KERNELS_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_KERNELS_H_

#include <cstdint>

#include "kernels/tokenspeed_kernel/csrc/cpu/weight_format.h"

namespace tokenspeed::cpu {

// out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n].
struct LinearArgs {
  const float* x;  // [num_tokens, k]
  int64_t x_stride;
  const uint8_t* weight;  // packed [n, k], see weight_format.h
  WeightFormat format;
  int64_t num_tokens, n, k;
  const float* bias;  // [n] or null
  float* out;         // [num_tokens, n]
  int64_t out_stride;
};

struct EmbeddingArgs {
  const void* token_ids;  // int32 or int64 [num_tokens]
  bool wide_ids;
  const uint8_t* weight;
  WeightFormat format;
  int64_t num_tokens, n, k;
  float* out;  // [num_tokens, k]
};

// residual may be null; otherwise it becomes x + residual, and the sum is what is normalised.
struct RmsNormArgs {
  const float* x;
  int64_t x_stride;
  float* residual;
  int64_t residual_stride;
  const float* weight;  // [hidden]
  float eps;
  int64_t num_tokens, hidden;
  float* out;  // [num_tokens, hidden], contiguous
};

// Gate and up side by side to one value. alpha and limit belong to the clamped kind alone. `out`
// may be `x`.
struct GatedArgs {
  const float* x;  // [num_tokens, 2 * width]
  int64_t x_stride;
  int64_t num_tokens, width;
  float alpha, limit;
  float* out;  // [num_tokens, width]
  int64_t out_stride;
};

struct RopeArgs {
  float* q;  // [num_tokens, num_heads, at least rot_dim]
  float* k;  // [num_tokens, num_kv_heads, at least rot_dim]
  int64_t q_stride, q_head_stride, k_stride, k_head_stride;
  const int64_t* positions;
  const float* cos_sin;  // [max_pos, rot_dim]
  int64_t num_tokens, num_heads, num_kv_heads, rot_dim;
  bool interleaved;  // pairs are neighbours, not half a head apart
};

// What an element of a cache is; fp8 is e4m3, whose values are multiplied by a scale.
enum class KvFormat : int32_t { kF32, kBf16, kFp8 };

constexpr int64_t KvBytes(KvFormat format) {
  return format == KvFormat::kF32 ? 4 : format == KvFormat::kBf16 ? 2 : 1;
}

struct StoreKvArgs {
  const float* k;  // [num_tokens, num_kv_heads, head_dim]
  const float* v;
  int64_t k_stride, v_stride;
  KvFormat format;
  uint8_t* k_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]
  uint8_t* v_cache;
  float* k_scales;  // [num_blocks, num_kv_heads, block_size], written; null: all scales are 1
  float* v_scales;
  int64_t k_block_stride, v_block_stride;
  const int64_t* slot_mapping;
  int64_t num_tokens, num_kv_heads, block_size, head_dim;
};

// One row a token: its latent, then its rotated key.
struct StoreLatentArgs {
  const float* latent;  // [num_tokens, latent_dim]
  const float* key;     // [num_tokens, key_dim]
  int64_t latent_stride, key_stride;
  KvFormat format;
  uint8_t* cache;  // [num_blocks, block_size, latent_dim + key_dim]
  int64_t block_stride;
  const int64_t* slot_mapping;
  int64_t num_tokens, block_size, latent_dim, key_dim;
};

// Vectors of one KV head lie head_dim apart in both caches; a value is the first value_dim elements
// of its vector. With kv_head_stride 0, all KV heads are the same one, read by groups of query
// heads.
struct AttentionArgs {
  const float* q;  // [num_tokens, num_heads, head_dim]
  int64_t q_stride;
  KvFormat format;
  const uint8_t* k_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]
  const uint8_t* v_cache;
  const float* k_scales = nullptr;  // [num_blocks, num_kv_heads, block_size]
  const float* v_scales = nullptr;
  int64_t k_block_stride, v_block_stride, kv_head_stride;
  const int32_t* block_tables;  // [num_rows, table_stride]
  int64_t table_stride;
  const int32_t* query_start;  // [num_rows + 1]
  const int32_t* kv_lens;      // [num_rows]
  int64_t num_rows, num_heads, num_kv_heads, block_size, head_dim, value_dim;
  float scale;
  int64_t window;                // 0: all positions
  float softcap;                 // 0: none
  const float* sinks = nullptr;  // [num_heads] or null
  float* out;                    // [num_tokens, num_heads, value_dim], contiguous
};

// One unit of attention: some consecutive queries of one row, one KV head, all or one split of the
// keys.
struct AttentionItem {
  int32_t row, kv_head;
  int32_t first_query, num_queries;  // within the row
  int32_t first_split, num_splits;   // in units of kSplitTokens absolute positions
  float* partial;                    // where a single split's state goes; null: finish into `out`
};

// Experts of a mixture: scores of all, the best top_k among the best top_groups of num_groups equal
// groups.
struct RouteArgs {
  const float* logits;  // [num_tokens, num_experts]
  int64_t logits_stride;
  const float* bias;  // [num_experts], added for the choice alone; or null
  int64_t num_tokens, num_experts, top_k, num_groups, top_groups;
  bool sigmoid;   // of each logit; else a softmax over all
  bool best_two;  // a group is ranked by the sum of its best two; else by its best
  bool renormalize;
  float scale;
  float* weights;    // [num_tokens, top_k]
  int32_t* experts;  // [num_tokens, top_k]
};

// Products that are independent of each other, with weights of one format.
struct GroupedLinearArgs {
  const LinearArgs* groups;
  int64_t num_groups;
  int64_t* task_ends;  // [num_groups], scratch
};

// out[t] = sum over k of weights[t, k] * rows[row_of[t, k]], in the order of k.
struct WeightedSumArgs {
  const float* rows;      // [., width]
  const int32_t* row_of;  // [num_tokens, top_k]
  const float* weights;   // [num_tokens, top_k]
  int64_t num_tokens, top_k, width;
  float* out;  // [num_tokens, width]
};

struct PenaltyArgs {
  float* logits;  // [num_rows, vocab]
  int64_t logits_stride;
  const int64_t* slots;
  const int32_t* output_counts;  // [num_slots, vocab]
  const uint8_t* prompt_mask;    // [num_slots, vocab]
  const float *repetition, *frequency, *presence;
  int64_t num_rows, vocab;
};

struct SampleArgs {
  const float* logits;  // [num_rows, vocab]
  int64_t logits_stride;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t *seeds, *positions;
  int64_t num_rows, vocab;
  int32_t* tokens;  // [num_rows]
};

// The index of the largest value + Gumbel noise among values that are >= threshold; the lowest
// index among equals.
struct NoisyArgs {
  const float* values;
  int64_t count;
  float threshold;
  uint64_t seed, position;
};

struct LogprobArgs {
  const float* logits;  // [num_rows, vocab]
  int64_t logits_stride;
  const void* token_ids;  // int32 or int64 [num_rows]
  bool wide_ids;
  int64_t num_rows, vocab, top_n;
  float* chosen;      // [num_rows]
  float* top_values;  // [num_rows, top_n]
  int32_t* top_ids;
};

// The primitives of one instruction set that need more than a loop over tokens around them.
struct KernelTable {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*silu_and_mul)(const GatedArgs&);
  void (*clamped_swiglu)(const GatedArgs&);
  void (*rope)(const RopeArgs&);
  // `next`: the item that this thread will probably run next, or null.
  void (*attention_item)(const AttentionArgs&, const AttentionItem&, const AttentionItem* next);
  void (*attention_combine)(const AttentionArgs&, const AttentionItem&, int64_t num_partials);
  void (*route)(const RouteArgs&);
  void (*grouped_linear)(const GroupedLinearArgs&);
  void (*weighted_sum)(const WeightedSumArgs&);
  void (*penalties)(const PenaltyArgs&);
  // Index of the first maximum; 0 when every value is NaN or -inf.
  int64_t (*argmax)(const float* values, int64_t count);
  // out = (values - shift) / divisor.
  void (*scale)(const float* values, int64_t count, float shift, float divisor, float* out);
  // The maximum of every sixteen values, the last group may be shorter.
  void (*group_max)(const float* values, int64_t count, float* out);
  // Values >= threshold with their indices, in order; returns how many. Both outputs have room for
  // all.
  int64_t (*collect)(const float* values, int64_t count, float threshold, float* out, int32_t* ids);
  // Sum of exp(value - shift).
  double (*sum_exp)(const float* values, int64_t count, float shift);
  int32_t (*best_noisy)(const NoisyArgs&);
};

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_KERNELS_H_
