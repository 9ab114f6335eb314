// SPDX-License-Identifier: MIT
//
// The Python module tokenspeed_kernel._cpu: raw addresses and sizes in, kernels called without the
// GIL. The wrappers in cpu_*.py check shapes, dtypes and contiguity; here only numbers inside
// tensors are checked, those that index memory: token ids, positions, slots, blocks. ValueError
// names the first bad one. No torch headers: the module works with any torch.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/tokenspeed_kernel/csrc/cpu/addresses.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/attention_plan.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/copies.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/dispatch.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/kv_cache.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/moe.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/pack.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/recording.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/sampling.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

namespace py = pybind11;

namespace tokenspeed::cpu {
namespace {

void LinearEntry(Address x, int64_t x_stride, Address weight, int format, int64_t num_tokens,
                 int64_t n, int64_t k, Address bias, Address out) {
  Kernels().linear({.x = At<const float>(x),
                    .x_stride = x_stride,
                    .weight = At<const uint8_t>(weight),
                    .format = static_cast<WeightFormat>(format),
                    .num_tokens = num_tokens,
                    .n = n,
                    .k = k,
                    .bias = At<const float>(bias),
                    .out = At<float>(out),
                    .out_stride = n});
}

void EmbeddingEntry(Address token_ids, bool wide_ids, Address weight, int format,
                    int64_t num_tokens, int64_t n, int64_t k, Address out) {
  CheckIds(At<const void>(token_ids), wide_ids, num_tokens, n, "token_ids");
  Kernels().embedding({.token_ids = At<const void>(token_ids),
                       .wide_ids = wide_ids,
                       .weight = At<const uint8_t>(weight),
                       .format = static_cast<WeightFormat>(format),
                       .num_tokens = num_tokens,
                       .n = n,
                       .k = k,
                       .out = At<float>(out)});
}

void RmsNormEntry(Address x, int64_t x_stride, Address residual, int64_t residual_stride,
                  Address weight, float eps, int64_t num_tokens, int64_t hidden, Address out) {
  Kernels().rms_norm({.x = At<const float>(x),
                      .x_stride = x_stride,
                      .residual = At<float>(residual),
                      .residual_stride = residual_stride,
                      .weight = At<const float>(weight),
                      .eps = eps,
                      .num_tokens = num_tokens,
                      .hidden = hidden,
                      .out = At<float>(out)});
}

void SiluAndMulEntry(Address x, int64_t x_stride, int64_t num_tokens, int64_t width, Address out) {
  Kernels().silu_and_mul({.x = At<const float>(x),
                          .x_stride = x_stride,
                          .num_tokens = num_tokens,
                          .width = width,
                          .alpha = 0.0f,
                          .limit = 0.0f,
                          .out = At<float>(out),
                          .out_stride = width});
}

void RopeEntry(Address q, int64_t q_stride, int64_t q_head_stride, int64_t num_heads, Address k,
               int64_t k_stride, int64_t k_head_stride, int64_t num_kv_heads, Address positions,
               int64_t num_tokens, Address cos_sin, int64_t max_positions, int64_t rot_dim,
               bool interleaved) {
  CheckBelow(At<const int64_t>(positions), num_tokens, max_positions, "positions");
  Kernels().rope({.q = At<float>(q),
                  .k = At<float>(k),
                  .q_stride = q_stride,
                  .q_head_stride = q_head_stride,
                  .k_stride = k_stride,
                  .k_head_stride = k_head_stride,
                  .positions = At<const int64_t>(positions),
                  .cos_sin = At<const float>(cos_sin),
                  .num_tokens = num_tokens,
                  .num_heads = num_heads,
                  .num_kv_heads = num_kv_heads,
                  .rot_dim = rot_dim,
                  .interleaved = interleaved});
}

// Strides count elements, whose format is `format` (a KvFormat).
struct CacheShape {
  int64_t num_blocks, num_kv_heads, block_size, head_dim, k_block_stride, v_block_stride;
  int format;
};
using ScaleAddresses = std::pair<Address, Address>;  // of both caches; 0 where there are none

void StoreKvEntry(Address k, int64_t k_stride, Address v, int64_t v_stride, int64_t num_tokens,
                  Address k_cache, Address v_cache, const ScaleAddresses& scales,
                  const CacheShape& shape, Address slot_mapping) {
  CheckBelow(At<const int64_t>(slot_mapping), num_tokens, shape.num_blocks * shape.block_size,
             "slot_mapping");
  StoreKv({.k = At<const float>(k),
           .v = At<const float>(v),
           .k_stride = k_stride,
           .v_stride = v_stride,
           .format = static_cast<KvFormat>(shape.format),
           .k_cache = At<uint8_t>(k_cache),
           .v_cache = At<uint8_t>(v_cache),
           .k_scales = At<float>(scales.first),
           .v_scales = At<float>(scales.second),
           .k_block_stride = shape.k_block_stride,
           .v_block_stride = shape.v_block_stride,
           .slot_mapping = At<const int64_t>(slot_mapping),
           .num_tokens = num_tokens,
           .num_kv_heads = shape.num_kv_heads,
           .block_size = shape.block_size,
           .head_dim = shape.head_dim});
}

// Rows must lie within the queries, the tables and the cache; a bad one would read foreign memory.
void CheckRows(const AttentionArgs& args, int64_t num_tokens, int64_t table_columns,
               int64_t num_blocks) {
  const auto fail = [](const char* what, int64_t row, int64_t value) {
    throw std::invalid_argument(std::string(what) + " of row " + std::to_string(row) + " is " +
                                std::to_string(value));
  };
  if (args.query_start[0] != 0) fail("query_start", 0, args.query_start[0]);
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const int64_t query_len = int64_t{args.query_start[row + 1]} - args.query_start[row];
    const int64_t kv_len = args.kv_lens[row];
    if (query_len < 0 || args.query_start[row + 1] > num_tokens)
      fail("query end", row, args.query_start[row + 1]);
    if (query_len == 0) continue;
    if (kv_len < query_len || kv_len > table_columns * args.block_size)
      fail("kv_lens", row, kv_len);
    const int32_t* const table = args.block_tables + row * args.table_stride;
    CheckBelow(table, (kv_len + args.block_size - 1) / args.block_size, num_blocks,
               "block_tables row");
  }
}

void AttentionEntry(Address q, int64_t q_stride, int64_t num_tokens, int64_t num_heads,
                    Address k_cache, Address v_cache, const ScaleAddresses& scales,
                    const CacheShape& shape, Address block_tables, int64_t table_stride,
                    int64_t table_columns, Address query_start, Address kv_lens, int64_t num_rows,
                    float scale, int64_t window, float softcap, Address sinks, Address out) {
  const AttentionArgs args{.q = At<const float>(q),
                           .q_stride = q_stride,
                           .format = static_cast<KvFormat>(shape.format),
                           .k_cache = At<const uint8_t>(k_cache),
                           .v_cache = At<const uint8_t>(v_cache),
                           .k_scales = At<const float>(scales.first),
                           .v_scales = At<const float>(scales.second),
                           .k_block_stride = shape.k_block_stride,
                           .v_block_stride = shape.v_block_stride,
                           .kv_head_stride = shape.block_size * shape.head_dim,
                           .block_tables = At<const int32_t>(block_tables),
                           .table_stride = table_stride,
                           .query_start = At<const int32_t>(query_start),
                           .kv_lens = At<const int32_t>(kv_lens),
                           .num_rows = num_rows,
                           .num_heads = num_heads,
                           .num_kv_heads = shape.num_kv_heads,
                           .block_size = shape.block_size,
                           .head_dim = shape.head_dim,
                           .value_dim = shape.head_dim,
                           .scale = scale,
                           .window = window,
                           .softcap = softcap,
                           .sinks = At<const float>(sinks),
                           .out = At<float>(out)};
  CheckRows(args, num_tokens, table_columns, shape.num_blocks);
  PagedAttention(Kernels(), args);
}

// How experts are chosen; see RouteArgs.
struct RouteRule {
  int64_t num_experts, top_k, num_groups, top_groups;
  bool sigmoid, best_two, renormalize;
  float scale;
};

void RouteEntry(Address logits, int64_t logits_stride, Address bias, int64_t num_tokens,
                const RouteRule& rule, Address weights, Address experts) {
  Kernels().route({.logits = At<const float>(logits),
                   .logits_stride = logits_stride,
                   .bias = At<const float>(bias),
                   .num_tokens = num_tokens,
                   .num_experts = rule.num_experts,
                   .top_k = rule.top_k,
                   .num_groups = rule.num_groups,
                   .top_groups = rule.top_groups,
                   .sigmoid = rule.sigmoid,
                   .best_two = rule.best_two,
                   .renormalize = rule.renormalize,
                   .scale = rule.scale,
                   .weights = At<float>(weights),
                   .experts = At<int32_t>(experts)});
}

// One or two matrices of gate and up, one of down, with the biases and the activation: what a layer
// keeps between calls.
struct ExpertLayer {
  int64_t num_experts, num_parts;
  ExpertMatrix gate_up[2];
  ExpertMatrix down;
  Address gate_up_bias, down_bias;
  bool clamped;
  float alpha, limit;
};

ExpertMatrix MatrixOf(Address data, int format, int64_t expert_bytes, int64_t n, int64_t k) {
  return {At<const uint8_t>(data), static_cast<WeightFormat>(format), expert_bytes, n, k};
}

ExpertLayer MakeExpertLayer(int64_t num_experts, const std::vector<ExpertMatrix>& gate_up,
                            const ExpertMatrix& down, Address gate_up_bias, Address down_bias,
                            bool clamped, float alpha, float limit) {
  ExpertLayer layer{.num_experts = num_experts,
                    .num_parts = static_cast<int64_t>(gate_up.size()),
                    .gate_up = {},
                    .down = down,
                    .gate_up_bias = gate_up_bias,
                    .down_bias = down_bias,
                    .clamped = clamped,
                    .alpha = alpha,
                    .limit = limit};
  if (gate_up.empty() || gate_up.size() > 2) {
    throw std::invalid_argument("gate_up must be one matrix or two");
  }
  for (size_t i = 0; i < gate_up.size(); ++i) layer.gate_up[i] = gate_up[i];
  return layer;
}

void ExpertsEntry(const ExpertLayer& layer, Address x, int64_t x_stride, Address weights,
                  Address chosen, int64_t num_tokens, int64_t top_k, Address gate_up_rows,
                  Address hidden_rows, Address out) {
  CheckBelow(At<const int32_t>(chosen), num_tokens * top_k, layer.num_experts, "chosen");
  RunExperts(Kernels(), {.x = At<const float>(x),
                         .x_stride = x_stride,
                         .weights = At<const float>(weights),
                         .chosen = At<const int32_t>(chosen),
                         .num_tokens = num_tokens,
                         .top_k = top_k,
                         .num_experts = layer.num_experts,
                         .gate_up = {layer.gate_up[0], layer.gate_up[1]},
                         .num_parts = layer.num_parts,
                         .down = layer.down,
                         .gate_up_bias = At<const float>(layer.gate_up_bias),
                         .down_bias = At<const float>(layer.down_bias),
                         .clamped = layer.clamped,
                         .alpha = layer.alpha,
                         .limit = layer.limit,
                         .gate_up_rows = At<float>(gate_up_rows),
                         .hidden_rows = At<float>(hidden_rows),
                         .out = At<float>(out)});
}

// shape: one KV head of head_dim = latent and rotated key; both strides are the blocks'.
void LatentAttentionEntry(Address q, int64_t q_stride, int64_t num_tokens, int64_t num_heads,
                          Address cache, const CacheShape& shape, Address block_tables,
                          int64_t table_stride, int64_t table_columns, Address query_start,
                          Address kv_lens, int64_t num_rows, float scale, int64_t latent_dim,
                          Address out) {
  const AttentionArgs args{.q = At<const float>(q),
                           .q_stride = q_stride,
                           .format = static_cast<KvFormat>(shape.format),
                           .k_cache = At<const uint8_t>(cache),
                           .v_cache = At<const uint8_t>(cache),
                           .k_block_stride = shape.k_block_stride,
                           .v_block_stride = shape.k_block_stride,
                           .kv_head_stride = 0,
                           .block_tables = At<const int32_t>(block_tables),
                           .table_stride = table_stride,
                           .query_start = At<const int32_t>(query_start),
                           .kv_lens = At<const int32_t>(kv_lens),
                           .num_rows = num_rows,
                           .num_heads = num_heads,
                           .num_kv_heads = num_heads / LatentGroup(num_heads),
                           .block_size = shape.block_size,
                           .head_dim = shape.head_dim,
                           .value_dim = latent_dim,
                           .scale = scale,
                           .window = 0,
                           .softcap = 0.0f,
                           .out = At<float>(out)};
  CheckRows(args, num_tokens, table_columns, shape.num_blocks);
  PagedAttention(Kernels(), args);
}

void StoreLatentEntry(Address latent, int64_t latent_stride, int64_t latent_dim, Address key,
                      int64_t key_stride, int64_t num_tokens, Address cache,
                      const CacheShape& shape, Address slot_mapping) {
  CheckBelow(At<const int64_t>(slot_mapping), num_tokens, shape.num_blocks * shape.block_size,
             "slot_mapping");
  StoreLatent({.latent = At<const float>(latent),
               .key = At<const float>(key),
               .latent_stride = latent_stride,
               .key_stride = key_stride,
               .format = static_cast<KvFormat>(shape.format),
               .cache = At<uint8_t>(cache),
               .block_stride = shape.k_block_stride,
               .slot_mapping = At<const int64_t>(slot_mapping),
               .num_tokens = num_tokens,
               .block_size = shape.block_size,
               .latent_dim = latent_dim,
               .key_dim = shape.head_dim - latent_dim});
}

// weight: num_heads matrices [n, k] on top of each other, n a multiple of a panel's rows.
void HeadsLinearEntry(Address x, int64_t x_stride, int64_t x_head_stride, Address weight,
                      int format, int64_t num_tokens, int64_t num_heads, int64_t n, int64_t k,
                      Address out, int64_t out_stride, int64_t out_head_stride) {
  const auto code = static_cast<WeightFormat>(format);
  const int64_t weight_bytes = PackedBytes(code, n, k);
  std::vector<LinearArgs> heads(num_heads);
  std::vector<int64_t> task_ends(num_heads);
  for (int64_t head = 0; head < num_heads; ++head) {
    heads[head] = {.x = At<const float>(x) + head * x_head_stride,
                   .x_stride = x_stride,
                   .weight = At<const uint8_t>(weight) + head * weight_bytes,
                   .format = code,
                   .num_tokens = num_tokens,
                   .n = n,
                   .k = k,
                   .bias = nullptr,
                   .out = At<float>(out) + head * out_head_stride,
                   .out_stride = out_stride};
  }
  Kernels().grouped_linear({heads.data(), num_heads, task_ends.data()});
}

void CopyBlocksEntry(Address cache, int64_t num_blocks, int64_t block_bytes, Address pairs,
                     int64_t num_pairs) {
  CheckBelow(At<const int32_t>(pairs), 2 * num_pairs, num_blocks, "pairs");
  CopyBlocks(At<uint8_t>(cache), block_bytes, At<const int32_t>(pairs), num_pairs);
}

void PenaltiesEntry(Address logits, int64_t num_rows, int64_t vocab, Address slots,
                    int64_t num_slots, Address output_counts, Address prompt_mask,
                    Address repetition, Address frequency, Address presence) {
  CheckBelow(At<const int64_t>(slots), num_rows, num_slots, "slots");
  Kernels().penalties({.logits = At<float>(logits),
                       .logits_stride = vocab,
                       .slots = At<const int64_t>(slots),
                       .output_counts = At<const int32_t>(output_counts),
                       .prompt_mask = At<const uint8_t>(prompt_mask),
                       .repetition = At<const float>(repetition),
                       .frequency = At<const float>(frequency),
                       .presence = At<const float>(presence),
                       .num_rows = num_rows,
                       .vocab = vocab});
}

void TokenMaskEntry(Address logits, int64_t num_rows, int64_t vocab, Address mask, Address rows,
                    int64_t count) {
  CheckBelow(At<const int64_t>(rows), count, num_rows, "rows");
  TokenMask({.logits = At<float>(logits),
             .vocab = vocab,
             .mask = At<const uint32_t>(mask),
             .rows = At<const int64_t>(rows),
             .count = count});
}

void SampleEntry(Address logits, int64_t num_rows, int64_t vocab, Address temperature,
                 Address top_k, Address top_p, Address min_p, Address seeds, Address positions,
                 Address tokens) {
  Sample(Kernels(), {.logits = At<const float>(logits),
                     .logits_stride = vocab,
                     .temperature = At<const float>(temperature),
                     .top_k = At<const int32_t>(top_k),
                     .top_p = At<const float>(top_p),
                     .min_p = At<const float>(min_p),
                     .seeds = At<const int64_t>(seeds),
                     .positions = At<const int64_t>(positions),
                     .num_rows = num_rows,
                     .vocab = vocab,
                     .tokens = At<int32_t>(tokens)});
}

void LogprobsEntry(Address logits, int64_t num_rows, int64_t vocab, Address token_ids,
                   bool wide_ids, int64_t top_n, Address chosen, Address top_values,
                   Address top_ids) {
  CheckIds(At<const void>(token_ids), wide_ids, num_rows, vocab, "tokens");
  Logprobs(Kernels(), {.logits = At<const float>(logits),
                       .logits_stride = vocab,
                       .token_ids = At<const void>(token_ids),
                       .wide_ids = wide_ids,
                       .num_rows = num_rows,
                       .vocab = vocab,
                       .top_n = top_n,
                       .chosen = At<float>(chosen),
                       .top_values = At<float>(top_values),
                       .top_ids = At<int32_t>(top_ids)});
}

void PackEntry(int format, Address source, int64_t n, int64_t k, Address packed) {
  PackWeight(static_cast<WeightFormat>(format), At<const uint8_t>(source), n, k,
             At<uint8_t>(packed));
}

using NoGil = py::call_guard<py::gil_scoped_release>;

// A kernel that recordings keep.
template <auto kEntry>
void Define(py::module_& m, const char* name) {
  m.def(name, &Recorded<kEntry>::Call, NoGil());
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  py::class_<CacheShape>(m, "CacheShape")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int>(),
           py::arg("num_blocks"), py::arg("num_kv_heads"), py::arg("block_size"),
           py::arg("head_dim"), py::arg("k_block_stride"), py::arg("v_block_stride"),
           py::arg("format"))
      .def_readonly("num_kv_heads", &CacheShape::num_kv_heads)
      .def_readonly("head_dim", &CacheShape::head_dim);
  py::class_<RouteRule>(m, "RouteRule")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, bool, bool, bool, float>(),
           py::arg("num_experts"), py::arg("top_k"), py::arg("num_groups"), py::arg("top_groups"),
           py::arg("sigmoid"), py::arg("best_two"), py::arg("renormalize"), py::arg("scale"));
  py::class_<ExpertMatrix>(m, "ExpertMatrix")
      .def(py::init(&MatrixOf), py::arg("data"), py::arg("format"), py::arg("expert_bytes"),
           py::arg("num_rows"), py::arg("num_columns"));
  py::class_<ExpertLayer>(m, "ExpertLayer")
      .def(py::init(&MakeExpertLayer), py::arg("num_experts"), py::arg("gate_up"), py::arg("down"),
           py::arg("gate_up_bias"), py::arg("down_bias"), py::arg("clamped"), py::arg("alpha"),
           py::arg("limit"));
  m.def("isa", [] { return Kernels().name; });
  m.def("use_isa", &UseIsa, py::arg("name"));
  m.def("num_threads", [] { return ThreadPool::Global().num_threads(); });
  m.def(
      "set_num_threads",
      [](int n) {
        if (n < 1 || n > ThreadPool::kMaxThreads) {
          throw std::invalid_argument("num_threads must be in [1, " +
                                      std::to_string(ThreadPool::kMaxThreads) + "], got " +
                                      std::to_string(n));
        }
        ThreadPool::Global().SetNumThreads(n);
      },
      py::arg("num_threads"), NoGil());
  m.def("shutdown", [] { ThreadPool::Global().Shutdown(); }, NoGil());
  py::module_::import("atexit").attr("register")(m.attr("shutdown"));
  m.def("packed_bytes", [](int f, int64_t n, int64_t k) {
    return PackedBytes(static_cast<WeightFormat>(f), n, k);
  });
  m.def(
      "advise_huge_pages", [](Address at, int64_t n) { AdviseHugePages(At<uint8_t>(at), n); },
      NoGil());
  m.def("pack", &PackEntry, NoGil());
  py::class_<Recording, std::shared_ptr<Recording>>(m, "Recording")
      .def(py::init<>())
      .def("start", &Recording::Start)
      .def_static("stop", &Recording::Stop)
      .def("play", &Recording::Play, NoGil())
      .def("__len__", &Recording::size);
  Define<&LinearEntry>(m, "linear");
  Define<&EmbeddingEntry>(m, "embedding");
  Define<&RmsNormEntry>(m, "rms_norm");
  Define<&SiluAndMulEntry>(m, "silu_and_mul");
  Define<&RopeEntry>(m, "rope");
  Define<&StoreKvEntry>(m, "store_kv");
  Define<&AttentionEntry>(m, "attention");
  Define<&RouteEntry>(m, "route");
  Define<&ExpertsEntry>(m, "experts");
  Define<&LatentAttentionEntry>(m, "latent_attention");
  Define<&StoreLatentEntry>(m, "store_latent");
  Define<&HeadsLinearEntry>(m, "heads_linear");
  Define<&CopyBlocksEntry>(m, "copy_blocks");
  Define<&MoveBlocks>(m, "move_blocks");
  Define<&PenaltiesEntry>(m, "penalties");
  Define<&TokenMaskEntry>(m, "token_mask");
  Define<&SampleEntry>(m, "sample");
  Define<&LogprobsEntry>(m, "logprobs");
  Define<&Clear>(m, "clear");
  Define<&CopyRows>(m, "copy_rows");
  Define<&Add>(m, "add");
}

}  // namespace tokenspeed::cpu
