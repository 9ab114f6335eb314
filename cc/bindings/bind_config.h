// SPDX-License-Identifier: MIT
//
// What Python tells the scheduler: its configuration, and requests. Part of the module's source;
// names and conversions only. Called once, when the module is imported.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/bindings/arguments.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {

inline std::vector<int32_t> Copy(const py::object& given, const char* field) {
  const TokenArray array = Tokens(given, field, 1, "[tokens]");
  return {array.data(), array.data() + array.size()};
}

inline constexpr const char* kRoleNames[] = {"fused", "prefill", "decode"};
inline constexpr const char* kGroupNames[] = {"full", "window", "state"};
inline constexpr const char* kPauseNames[] = {"abort", "wait", "keep"};

// The index of `name` in `names`, as the enum that they spell.
template <class Enum, size_t N>
Enum Parse(const char* field, const py::object& given, const char* const (&names)[N]) {
  const std::string name = Text(given, field);
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw py::value_error(std::string(field) + " is unknown: " + name);
}

inline std::vector<CacheGroup> Groups(const py::object& given) {
  if (!py::isinstance<py::list>(given)) Refuse("groups", "a list of CacheGroup", given);
  std::vector<CacheGroup> groups;
  for (const py::handle& item : given) {
    groups.push_back(Instance<CacheGroup>(item, "groups", "CacheGroup"));
  }
  return groups;
}

inline void BindConfig(py::module_& m) {
  py::class_<CacheGroup>(m, "CacheGroup")
      .def(py::init([](const py::object& kind, const py::object& blocks_per_parent,
                       const py::object& window_tokens, const py::object& checkpoint_tokens) {
             return CacheGroup{Parse<GroupKind>("kind", kind, kGroupNames),
                               Integer<int32_t>(blocks_per_parent, "blocks_per_parent"),
                               Integer<int32_t>(window_tokens, "window_tokens"),
                               Integer<int32_t>(checkpoint_tokens, "checkpoint_tokens")};
           }),
           py::kw_only(), py::arg("kind"), py::arg("blocks_per_parent"), py::arg("window_tokens"),
           py::arg("checkpoint_tokens"))
      .def_property_readonly(
          "kind", [](const CacheGroup& g) { return kGroupNames[static_cast<size_t>(g.kind)]; })
      .def_readonly("blocks_per_parent", &CacheGroup::blocks_per_parent)
      .def_readonly("window_tokens", &CacheGroup::window_tokens)
      .def_readonly("checkpoint_tokens", &CacheGroup::checkpoint_tokens);

  py::class_<StoreConfig>(m, "StoreConfig")
      .def(py::init([](const py::object& max_prefetches, const py::object& max_puts,
                       const py::object& min_blocks, const py::object& prefetch_timeout_us,
                       const py::object& put_timeout_us, const py::object& backoff_us,
                       const py::object& max_backoff_us) {
             return StoreConfig{true,
                                Integer<int32_t>(max_prefetches, "max_prefetches"),
                                Integer<int32_t>(max_puts, "max_puts"),
                                Integer<int32_t>(min_blocks, "min_blocks"),
                                Integer<int64_t>(prefetch_timeout_us, "prefetch_timeout_us"),
                                Integer<int64_t>(put_timeout_us, "put_timeout_us"),
                                Integer<int64_t>(backoff_us, "backoff_us"),
                                Integer<int64_t>(max_backoff_us, "max_backoff_us")};
           }),
           py::kw_only(), py::arg("max_prefetches"), py::arg("max_puts"), py::arg("min_blocks"),
           py::arg("prefetch_timeout_us"), py::arg("put_timeout_us"), py::arg("backoff_us"),
           py::arg("max_backoff_us"))
      .def_readonly("max_prefetches", &StoreConfig::max_prefetches)
      .def_readonly("max_puts", &StoreConfig::max_puts)
      .def_readonly("min_blocks", &StoreConfig::min_blocks)
      .def_readonly("prefetch_timeout_us", &StoreConfig::prefetch_timeout_us)
      .def_readonly("put_timeout_us", &StoreConfig::put_timeout_us)
      .def_readonly("backoff_us", &StoreConfig::backoff_us)
      .def_readonly("max_backoff_us", &StoreConfig::max_backoff_us);

  py::class_<SchedulerConfig>(m, "SchedulerConfig")
      .def(py::init([](const py::object& num_blocks, const py::object& block_size,
                       const py::object& max_num_seqs, const py::object& max_model_len,
                       const py::object& max_batched_tokens, const py::object& chunked_prefill,
                       const py::object& overlap_depth, const py::object& verify_width,
                       const py::object& max_decode_gap_tokens,
                       const py::object& enable_prefix_caching, const py::object& eos_token_ids,
                       const py::object& role, const py::object& num_host_blocks,
                       const py::object& groups, const py::object& verify_overlap,
                       const py::object& num_layers, const py::object& load_lead_layers,
                       const py::object& store, const py::object& context_cost_tokens) {
             return SchedulerConfig{
                 Integer<int32_t>(num_blocks, "num_blocks"),
                 Integer<int32_t>(block_size, "block_size"),
                 Integer<int32_t>(max_num_seqs, "max_num_seqs"),
                 Integer<int32_t>(max_model_len, "max_model_len"),
                 Integer<int32_t>(max_batched_tokens, "max_batched_tokens"),
                 Flag(chunked_prefill, "chunked_prefill"),
                 Integer<int32_t>(overlap_depth, "overlap_depth"),
                 Integer<int32_t>(verify_width, "verify_width"),
                 Flag(verify_overlap, "verify_overlap"),
                 Integer<int32_t>(max_decode_gap_tokens, "max_decode_gap_tokens"),
                 Integer<int32_t>(context_cost_tokens, "context_cost_tokens"),
                 Flag(enable_prefix_caching, "enable_prefix_caching"),
                 Integers(eos_token_ids, "eos_token_ids"),
                 Parse<Role>("role", role, kRoleNames),
                 Integer<int32_t>(num_host_blocks, "num_host_blocks"),
                 Groups(groups),
                 Integer<int32_t>(num_layers, "num_layers"),
                 Integer<int32_t>(load_lead_layers, "load_lead_layers"),
                 store.is_none() ? StoreConfig{}
                                 : Instance<StoreConfig>(store, "store", "StoreConfig")};
           }),
           py::kw_only(), py::arg("num_blocks"), py::arg("block_size"), py::arg("max_num_seqs"),
           py::arg("max_model_len"), py::arg("max_batched_tokens"), py::arg("chunked_prefill"),
           py::arg("overlap_depth"), py::arg("verify_width"), py::arg("max_decode_gap_tokens"),
           py::arg("enable_prefix_caching"), py::arg("eos_token_ids"), py::arg("role") = "fused",
           py::arg("num_host_blocks") = 0,
           py::arg("groups") = std::vector<CacheGroup>{{GroupKind::kFull, 1, 0, 0}},
           py::arg("verify_overlap") = false, py::arg("num_layers") = 1,
           py::arg("load_lead_layers") = 1, py::arg("store") = py::none(),
           py::arg("context_cost_tokens") = 0)
      .def_readonly("num_blocks", &SchedulerConfig::num_blocks)
      .def_readonly("block_size", &SchedulerConfig::block_size)
      .def_readonly("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readonly("max_model_len", &SchedulerConfig::max_model_len)
      .def_readonly("max_batched_tokens", &SchedulerConfig::max_batched_tokens)
      .def_readonly("chunked_prefill", &SchedulerConfig::chunked_prefill)
      .def_readonly("overlap_depth", &SchedulerConfig::overlap_depth)
      .def_readonly("verify_width", &SchedulerConfig::verify_width)
      .def_readonly("verify_overlap", &SchedulerConfig::verify_overlap)
      .def_readonly("max_decode_gap_tokens", &SchedulerConfig::max_decode_gap_tokens)
      .def_readonly("context_cost_tokens", &SchedulerConfig::context_cost_tokens)
      .def_readonly("enable_prefix_caching", &SchedulerConfig::enable_prefix_caching)
      .def_readonly("eos_token_ids", &SchedulerConfig::eos_token_ids)
      .def_property_readonly(
          "role", [](const SchedulerConfig& c) { return kRoleNames[static_cast<size_t>(c.role)]; })
      .def_readonly("num_host_blocks", &SchedulerConfig::num_host_blocks)
      .def_readonly("groups", &SchedulerConfig::groups)
      .def_readonly("num_layers", &SchedulerConfig::num_layers)
      .def_readonly("load_lead_layers", &SchedulerConfig::load_lead_layers)
      .def_property_readonly("store", [](const SchedulerConfig& c) -> std::optional<StoreConfig> {
        if (!c.store.enabled) return std::nullopt;
        return c.store;
      });

  py::class_<RequestSpec>(m, "RequestSpec")
      .def(py::init([](const py::object& request_id, const py::object& token_ids,
                       const py::object& max_new_tokens, const py::object& min_new_tokens,
                       const py::object& stop_token_ids, const py::object& ignore_eos,
                       const py::object& priority, const py::object& cache_salt,
                       const py::object& adapter) {
             return RequestSpec{RequestId(Integer<int64_t>(request_id, "request_id")),
                                Copy(token_ids, "token_ids"),
                                Integer<int32_t>(max_new_tokens, "max_new_tokens"),
                                Integer<int32_t>(min_new_tokens, "min_new_tokens"),
                                Integers(stop_token_ids, "stop_token_ids"),
                                Flag(ignore_eos, "ignore_eos"),
                                Integer<int32_t>(priority, "priority"),
                                Integer<int64_t>(cache_salt, "cache_salt"),
                                Integer<int64_t>(adapter, "adapter")};
           }),
           py::kw_only(), py::arg("request_id"), py::arg("token_ids"), py::arg("max_new_tokens"),
           py::arg("min_new_tokens"), py::arg("stop_token_ids"), py::arg("ignore_eos"),
           py::arg("priority"), py::arg("cache_salt"), py::arg("adapter"));
}

}  // namespace tokenspeed
