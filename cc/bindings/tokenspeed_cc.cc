// SPDX-License-Identifier: MIT
//
// The Python face of the scheduler: names, views and errors, no logic. Arrays of a Plan or an
// Outcome are read-only numpy views that keep their owner alive; tokenspeed_cc.pyi is the
// documentation. The GIL is released while the scheduler works. A refusal becomes ValueError, a
// broken invariant RuntimeError.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/bindings/arguments.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {
namespace {

void Raise(const Status& status) {
  if (!status.ok()) throw py::value_error(status.reason());
}

// A read-only view of `data`, which `owner` keeps alive.
template <class T>
py::array View(const T* data, std::vector<py::ssize_t> shape, py::handle owner) {
  py::array_t<T> view(std::move(shape), data, owner);
  py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return view;
}

template <class T>
py::array View(const std::vector<T>& values, py::handle owner) {
  return View(values.data(), {static_cast<py::ssize_t>(values.size())}, owner);
}

// Adds a property `name` that views the vector `member` of an immutable C++ object.
template <class Class, class Owner, class T>
void DefView(Class& cls, const char* name, const std::vector<T> Owner::* member) {
  cls.def_property_readonly(
      name, [member](py::object self) { return View(self.cast<const Owner&>().*member, self); });
}

// A vector of structs of int32, viewed as int32[n, fields].
template <class T>
py::array ViewTuples(const std::vector<T>& values, py::handle owner) {
  constexpr py::ssize_t kFields = sizeof(T) / sizeof(int32_t);
  return View(reinterpret_cast<const int32_t*>(values.data()),
              {static_cast<py::ssize_t>(values.size()), kFields}, owner);
}

template <class Class, class Owner, class T>
void DefTuples(Class& cls, const char* name, const std::vector<T> Owner::* member) {
  cls.def_property_readonly(name, [member](py::object self) {
    return ViewTuples(self.cast<const Owner&>().*member, self);
  });
}

// One group's part of a plan, which it keeps alive.
struct GroupPlanView {
  py::object plan;
  size_t side;
  template <class T>
  py::array View(const std::vector<T> GroupPlan::* member) const {
    return ViewTuples(plan.cast<const Plan&>().groups[side].*member, plan);
  }
};

std::vector<int32_t> Copy(const py::object& given, const char* field) {
  const TokenArray array = Tokens(given, field, 1, "[tokens]");
  return {array.data(), array.data() + array.size()};
}

constexpr const char* kRoleNames[] = {"fused", "prefill", "decode"};
constexpr const char* kGroupNames[] = {"full", "window", "state"};
constexpr const char* kPauseNames[] = {"abort", "wait", "keep"};

// The index of `name` in `names`, as the enum that they spell.
template <class Enum, size_t N>
Enum Parse(const char* field, const py::object& given, const char* const (&names)[N]) {
  const std::string name = Text(given, field);
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw py::value_error(std::string(field) + " is unknown: " + name);
}

std::vector<CacheGroup> Groups(const py::object& given) {
  if (!py::isinstance<py::list>(given)) Refuse("groups", "a list of CacheGroup", given);
  std::vector<CacheGroup> groups;
  for (const py::handle& item : given) {
    groups.push_back(Instance<CacheGroup>(item, "groups", "CacheGroup"));
  }
  return groups;
}

void BindConfig(py::module_& m) {
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

  py::class_<SchedulerConfig>(m, "SchedulerConfig")
      .def(py::init([](const py::object& num_blocks, const py::object& block_size,
                       const py::object& max_num_seqs, const py::object& max_model_len,
                       const py::object& max_batched_tokens, const py::object& chunked_prefill,
                       const py::object& overlap_depth, const py::object& verify_width,
                       const py::object& max_decode_gap_tokens,
                       const py::object& enable_prefix_caching, const py::object& eos_token_ids,
                       const py::object& role, const py::object& num_host_blocks,
                       const py::object& groups, const py::object& verify_overlap) {
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
                 Flag(enable_prefix_caching, "enable_prefix_caching"),
                 Integers(eos_token_ids, "eos_token_ids"),
                 Parse<Role>("role", role, kRoleNames),
                 Integer<int32_t>(num_host_blocks, "num_host_blocks"),
                 Groups(groups)};
           }),
           py::kw_only(), py::arg("num_blocks"), py::arg("block_size"), py::arg("max_num_seqs"),
           py::arg("max_model_len"), py::arg("max_batched_tokens"), py::arg("chunked_prefill"),
           py::arg("overlap_depth"), py::arg("verify_width"), py::arg("max_decode_gap_tokens"),
           py::arg("enable_prefix_caching"), py::arg("eos_token_ids"), py::arg("role") = "fused",
           py::arg("num_host_blocks") = 0,
           py::arg("groups") = std::vector<CacheGroup>{{GroupKind::kFull, 1, 0, 0}},
           py::arg("verify_overlap") = false)
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
      .def_readonly("enable_prefix_caching", &SchedulerConfig::enable_prefix_caching)
      .def_readonly("eos_token_ids", &SchedulerConfig::eos_token_ids)
      .def_property_readonly(
          "role", [](const SchedulerConfig& c) { return kRoleNames[static_cast<size_t>(c.role)]; })
      .def_readonly("num_host_blocks", &SchedulerConfig::num_host_blocks)
      .def_readonly("groups", &SchedulerConfig::groups);

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

void BindPlan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>> plan(m, "Plan");
  plan.def_readonly("step_id", &Plan::step_id)
      .def_property_readonly("num_rows", &Plan::num_rows)
      .def_readonly("num_decode_rows", &Plan::num_decode_rows)
      .def_property_readonly("samples",
                             [](py::object self) {
                               const auto& rows = self.cast<const Plan&>().samples;
                               return View(reinterpret_cast<const bool*>(rows.data()),
                                           {static_cast<py::ssize_t>(rows.size())}, self);
                             })
      .def_property_readonly("groups", [](py::object self) {
        py::list groups;
        const auto count = self.cast<const Plan&>().groups.size();
        for (size_t side = 0; side < count; ++side) groups.append(GroupPlanView{self, side});
        return groups;
      });
  DefTuples(plan, "block_copies", &Plan::block_copies);
  DefTuples(plan, "table_updates", &Plan::table_updates);
  py::class_<GroupPlanView>(m, "GroupPlan")
      .def_property_readonly(
          "table_updates", [](const GroupPlanView& v) { return v.View(&GroupPlan::table_updates); })
      .def_property_readonly("copies",
                             [](const GroupPlanView& v) { return v.View(&GroupPlan::copies); })
      .def_property_readonly("saves",
                             [](const GroupPlanView& v) { return v.View(&GroupPlan::saves); })
      .def_property_readonly("state_columns", [](const GroupPlanView& v) {
        return View(v.plan.cast<const Plan&>().groups[v.side].state_columns, v.plan);
      });
  DefView(plan, "request_ids", &Plan::request_ids);
  DefView(plan, "slots", &Plan::slots);
  DefView(plan, "query_lens", &Plan::query_lens);
  DefView(plan, "context_lens", &Plan::context_lens);
  DefView(plan, "context_slack", &Plan::context_slack);
  DefView(plan, "prompt_token_ids", &Plan::prompt_token_ids);
  DefView(plan, "new_slots", &Plan::new_slots);
  DefView(plan, "new_slot_request_ids", &Plan::new_slot_request_ids);

  py::class_<Outcome, std::shared_ptr<Outcome>> outcome(m, "Outcome");
  DefView(outcome, "request_ids", &Outcome::request_ids);
  DefView(outcome, "rows", &Outcome::rows);
  DefView(outcome, "num_tokens", &Outcome::num_tokens);
  DefView(outcome, "finish", &Outcome::finish);
  DefView(outcome, "prompt_tokens", &Outcome::prompt_tokens);
  DefView(outcome, "completion_tokens", &Outcome::completion_tokens);
  DefView(outcome, "cached_tokens", &Outcome::cached_tokens);
  DefView(outcome, "matched_tokens", &Outcome::matched_tokens);
}

const char* MediumName(Medium medium) { return medium == Medium::kDevice ? "device" : "host"; }

void BindReports(py::module_& m) {
  m.attr("FINISH_NONE") = static_cast<int>(Finish::kNone);
  m.attr("FINISH_STOP") = static_cast<int>(Finish::kStop);
  m.attr("FINISH_LENGTH") = static_cast<int>(Finish::kLength);
  m.attr("FINISH_ABORT") = static_cast<int>(Finish::kAbort);

  py::class_<RequestCounters>(m, "RequestCounters")
      .def_readonly("submitted_step", &RequestCounters::submitted_step)
      .def_readonly("admitted_step", &RequestCounters::admitted_step)
      .def_readonly("prefill_done_step", &RequestCounters::prefill_done_step)
      .def_readonly("first_token_step", &RequestCounters::first_token_step)
      .def_readonly("prompt_tokens", &RequestCounters::prompt_tokens)
      .def_readonly("cached_tokens", &RequestCounters::cached_tokens)
      .def_readonly("completion_tokens", &RequestCounters::completion_tokens)
      .def_readonly("num_retractions", &RequestCounters::num_retractions)
      .def_readonly("num_retracted_steps", &RequestCounters::num_retracted_steps)
      .def_readonly("num_delayed", &RequestCounters::num_delayed)
      .def_readonly("num_delayed_steps", &RequestCounters::num_delayed_steps)
      .def_readonly("num_sampling_rows", &RequestCounters::num_sampling_rows);

  py::class_<Ended>(m, "Ended")
      .def_readonly("request_id", &Ended::request_id)
      .def_property_readonly("finish", [](const Ended& e) { return static_cast<int>(e.finish); })
      .def_property_readonly("prompt_tokens",
                             [](const Ended& e) { return e.counters.prompt_tokens; })
      .def_property_readonly("completion_tokens",
                             [](const Ended& e) { return e.counters.completion_tokens; })
      .def_property_readonly("cached_tokens",
                             [](const Ended& e) { return e.counters.cached_tokens; });

  py::class_<Load>(m, "Load")
      .def_readonly("num_running", &Load::num_running)
      .def_readonly("num_waiting", &Load::num_waiting)
      .def_readonly("active_blocks", &Load::active_blocks)
      .def_readonly("cached_blocks", &Load::cached_blocks)
      .def_readonly("free_blocks", &Load::free_blocks)
      .def_readonly("total_blocks", &Load::total_blocks);

  m.attr("TRANSFER_STORE") = static_cast<int>(TransferKind::kStore);
  m.attr("TRANSFER_LOAD") = static_cast<int>(TransferKind::kLoad);
  m.attr("TRANSFER_SEND") = static_cast<int>(TransferKind::kSend);
  m.attr("TRANSFER_RECEIVE") = static_cast<int>(TransferKind::kReceive);
  py::class_<Transfer> transfer(m, "Transfer");
  transfer.def_readonly("transfer_id", &Transfer::id)
      .def_property_readonly("kind", [](const Transfer& t) { return static_cast<int>(t.kind); })
      .def_readonly("request_id", &Transfer::request_id)
      .def_readonly("slot", &Transfer::slot)
      .def_readonly("first_token", &Transfer::first_token)
      .def_readonly("num_tokens", &Transfer::num_tokens);
  DefView(transfer, "groups", &Transfer::groups);
  DefView(transfer, "columns", &Transfer::columns);
  DefView(transfer, "device_blocks", &Transfer::device_blocks);
  DefView(transfer, "host_blocks", &Transfer::host_blocks);

  py::class_<BlockStored>(m, "BlockStored")
      .def_property_readonly("medium", [](const BlockStored& e) { return MediumName(e.medium); })
      .def_readonly("block_hash", &BlockStored::hash)
      .def_property_readonly("parent_hash",
                             [](const BlockStored& e) -> std::optional<uint64_t> {
                               if (!e.has_parent) return std::nullopt;
                               return e.parent_hash;
                             })
      .def_readonly("token_ids", &BlockStored::token_ids);
  py::class_<BlockRemoved>(m, "BlockRemoved")
      .def_property_readonly("medium", [](const BlockRemoved& e) { return MediumName(e.medium); })
      .def_readonly("block_hash", &BlockRemoved::hash);
  py::class_<AllBlocksCleared>(m, "AllBlocksCleared");
}

std::shared_ptr<const Outcome> AdvanceStep(Scheduler& scheduler, const py::object& step_given,
                                           const py::object& token_ids_given,
                                           const py::object& num_tokens_given) {
  const StepId step(Integer<int64_t>(step_given, "step_id"));
  const TokenArray token_ids = Tokens(token_ids_given, "token_ids", 2, "[rows, width]");
  const TokenArray num_tokens = Tokens(num_tokens_given, "num_tokens", 1, "[rows]");
  if (token_ids.shape(0) != num_tokens.shape(0)) {
    throw py::value_error("token_ids and num_tokens must have the same number of rows");
  }
  const StepResult result{
      .width = static_cast<int32_t>(token_ids.shape(1)),
      .token_ids = {token_ids.data(), static_cast<size_t>(token_ids.size())},
      .num_tokens = {num_tokens.data(), static_cast<size_t>(num_tokens.size())},
  };
  py::gil_scoped_release unlocked;
  auto outcome = scheduler.Settle(step, result);
  if (outcome.ok()) return outcome.value();
  py::gil_scoped_acquire locked;
  throw py::value_error(outcome.status().reason());
}

void BindScheduler(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Scheduler>(m, "Scheduler")
      .def(py::init([](const py::object& config) {
             auto scheduler =
                 Scheduler::Create(Instance<SchedulerConfig>(config, "config", "SchedulerConfig"));
             Raise(scheduler.ok() ? Status::Ok() : scheduler.status());
             return std::move(scheduler.value());
           }),
           py::arg("config"))
      .def(
          "submit",
          [](Scheduler& s, const py::object& spec) {
            Raise(s.Submit(Instance<RequestSpec>(spec, "spec", "RequestSpec")));
          },
          py::arg("spec"))
      .def(
          "abort",
          [](Scheduler& s, const py::object& id) {
            return s.Abort(RequestId(Integer<int64_t>(id, "request_id")));
          },
          py::arg("request_id"))
      .def(
          "plan", [](Scheduler& s) { return std::const_pointer_cast<Plan>(s.MakePlan()); }, NoGil())
      .def(
          "advance",
          [](Scheduler& s, const py::object& step_id, const py::object& token_ids,
             const py::object& num_tokens) {
            return std::const_pointer_cast<Outcome>(AdvanceStep(s, step_id, token_ids, num_tokens));
          },
          py::arg("step_id"), py::arg("token_ids"), py::arg("num_tokens"))
      .def(
          "block_tables",
          [](py::object self, const py::object& given) {
            const auto& scheduler = self.cast<const Scheduler&>();
            const auto group = Integer<int32_t>(given, "group");
            if (group < 0 || group >= scheduler.num_groups()) {
              throw py::value_error("group " + std::to_string(group) + " does not exist");
            }
            const BlockTables& tables = scheduler.tables(group);
            return View(tables.cells().data(), {tables.num_slots(), tables.num_columns()}, self);
          },
          py::arg("group") = 0)
      .def("transfers", &Scheduler::TakeTransfers)
      .def(
          "settle_transfer",
          [](Scheduler& s, const py::object& id, const py::object& ok,
             const py::object& first_token) {
            auto outcome = s.SettleTransfer(Integer<int64_t>(id, "transfer_id"), Flag(ok, "ok"),
                                            Integer<int32_t>(first_token, "first_token"));
            Raise(outcome.ok() ? Status::Ok() : outcome.status());
            return std::const_pointer_cast<Outcome>(outcome.value());
          },
          py::arg("transfer_id"), py::arg("ok"), py::arg("first_token"))
      .def(
          "pause",
          [](Scheduler& s, const py::object& mode) {
            return s.Pause(Parse<PauseMode>("pause mode", mode, kPauseNames));
          },
          py::arg("mode"))
      .def("resume", &Scheduler::Resume)
      .def("has_work", &Scheduler::HasWork)
      .def("load", &Scheduler::load)
      .def("check", &Scheduler::CheckInvariants, NoGil())
      .def("flush_cache", &Scheduler::FlushCache)
      .def(
          "set_weight_version",
          [](Scheduler& s, const py::object& version) {
            Raise(s.SetWeightVersion(Integer<int64_t>(version, "version")));
          },
          py::arg("version"))
      .def("enable_kv_events", &Scheduler::EnableKvEvents)
      .def("kv_events", &Scheduler::TakeKvEvents)
      .def(
          "stats",
          [](const Scheduler& s, const py::object& given) {
            const RequestId id(Integer<int64_t>(given, "request_id"));
            const auto counters = s.CountersOf(id);
            if (!counters)
              throw py::value_error("request_id " + std::to_string(id.value()) + " is unknown");
            return *counters;
          },
          py::arg("request_id"));
}

}  // namespace
}  // namespace tokenspeed

PYBIND11_MODULE(tokenspeed_cc, m) {
  m.doc() = "The TokenSpeed control plane; see tokenspeed_cc.pyi.";
  tokenspeed::BindConfig(m);
  tokenspeed::BindPlan(m);
  tokenspeed::BindReports(m);
  tokenspeed::BindScheduler(m);
}
