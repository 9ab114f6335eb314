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

#include "cc/scheduler/scheduler.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

using TokenArray = py::array_t<int32_t, py::array::c_style>;

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

std::vector<int32_t> Copy(const TokenArray& array, const char* field) {
  if (array.ndim() != 1) throw py::value_error(std::string(field) + " must have one dimension");
  return {array.data(), array.data() + array.size()};
}

constexpr const char* kRoleNames[] = {"fused", "prefill", "decode"};
constexpr const char* kGroupNames[] = {"full", "window", "state"};
constexpr const char* kPauseNames[] = {"abort", "wait", "keep"};

// The index of `name` in `names`, as the enum that they spell.
template <class Enum, size_t N>
Enum Parse(const char* field, const std::string& name, const char* const (&names)[N]) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw py::value_error(std::string(field) + " is unknown: " + name);
}

Role ParseRole(const std::string& name) { return Parse<Role>("role", name, kRoleNames); }

void BindConfig(py::module_& m) {
  py::class_<CacheGroup>(m, "CacheGroup")
      .def(py::init([](const std::string& kind, int32_t blocks_per_parent, int32_t window_tokens,
                       int32_t checkpoint_tokens) {
             return CacheGroup{Parse<GroupKind>("kind", kind, kGroupNames), blocks_per_parent,
                               window_tokens, checkpoint_tokens};
           }),
           py::kw_only(), py::arg("kind"), py::arg("blocks_per_parent"), py::arg("window_tokens"),
           py::arg("checkpoint_tokens"))
      .def_property_readonly(
          "kind", [](const CacheGroup& g) { return kGroupNames[static_cast<size_t>(g.kind)]; })
      .def_readonly("blocks_per_parent", &CacheGroup::blocks_per_parent)
      .def_readonly("window_tokens", &CacheGroup::window_tokens)
      .def_readonly("checkpoint_tokens", &CacheGroup::checkpoint_tokens);

  py::class_<SchedulerConfig>(m, "SchedulerConfig")
      .def(py::init([](int32_t num_blocks, int32_t block_size, int32_t max_num_seqs,
                       int32_t max_model_len, int32_t max_batched_tokens, bool chunked_prefill,
                       int32_t overlap_depth, int32_t verify_width, int32_t max_decode_gap_tokens,
                       bool enable_prefix_caching, std::vector<int32_t> eos_token_ids,
                       const std::string& role, int32_t num_host_blocks,
                       std::vector<CacheGroup> groups) {
             return SchedulerConfig{num_blocks,
                                    block_size,
                                    max_num_seqs,
                                    max_model_len,
                                    max_batched_tokens,
                                    chunked_prefill,
                                    overlap_depth,
                                    verify_width,
                                    max_decode_gap_tokens,
                                    enable_prefix_caching,
                                    std::move(eos_token_ids),
                                    ParseRole(role),
                                    num_host_blocks,
                                    std::move(groups)};
           }),
           py::kw_only(), py::arg("num_blocks"), py::arg("block_size"), py::arg("max_num_seqs"),
           py::arg("max_model_len"), py::arg("max_batched_tokens"), py::arg("chunked_prefill"),
           py::arg("overlap_depth"), py::arg("verify_width"), py::arg("max_decode_gap_tokens"),
           py::arg("enable_prefix_caching"), py::arg("eos_token_ids"), py::arg("role") = "fused",
           py::arg("num_host_blocks") = 0,
           py::arg("groups") = std::vector<CacheGroup>{{GroupKind::kFull, 1, 0, 0}})
      .def_readonly("num_blocks", &SchedulerConfig::num_blocks)
      .def_readonly("block_size", &SchedulerConfig::block_size)
      .def_readonly("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readonly("max_model_len", &SchedulerConfig::max_model_len)
      .def_readonly("max_batched_tokens", &SchedulerConfig::max_batched_tokens)
      .def_readonly("chunked_prefill", &SchedulerConfig::chunked_prefill)
      .def_readonly("overlap_depth", &SchedulerConfig::overlap_depth)
      .def_readonly("verify_width", &SchedulerConfig::verify_width)
      .def_readonly("max_decode_gap_tokens", &SchedulerConfig::max_decode_gap_tokens)
      .def_readonly("enable_prefix_caching", &SchedulerConfig::enable_prefix_caching)
      .def_readonly("eos_token_ids", &SchedulerConfig::eos_token_ids)
      .def_property_readonly(
          "role", [](const SchedulerConfig& c) { return kRoleNames[static_cast<size_t>(c.role)]; })
      .def_readonly("num_host_blocks", &SchedulerConfig::num_host_blocks)
      .def_readonly("groups", &SchedulerConfig::groups);

  py::class_<RequestSpec>(m, "RequestSpec")
      .def(py::init([](int64_t request_id, const TokenArray& token_ids, int32_t max_new_tokens,
                       int32_t min_new_tokens, std::vector<int32_t> stop_token_ids, bool ignore_eos,
                       int32_t priority, int64_t cache_salt, int64_t adapter) {
             return RequestSpec{RequestId(request_id),
                                Copy(token_ids, "token_ids"),
                                max_new_tokens,
                                min_new_tokens,
                                std::move(stop_token_ids),
                                ignore_eos,
                                priority,
                                cache_salt,
                                adapter};
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
                             [](const GroupPlanView& v) { return v.View(&GroupPlan::saves); });
  DefView(plan, "request_ids", &Plan::request_ids);
  DefView(plan, "slots", &Plan::slots);
  DefView(plan, "query_lens", &Plan::query_lens);
  DefView(plan, "context_lens", &Plan::context_lens);
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

std::shared_ptr<const Outcome> AdvanceStep(Scheduler& scheduler, int64_t step_id,
                                           const TokenArray& token_ids,
                                           const TokenArray& num_tokens) {
  if (token_ids.ndim() != 2) throw py::value_error("token_ids must be [rows, width]");
  if (num_tokens.ndim() != 1) throw py::value_error("num_tokens must be [rows]");
  if (token_ids.shape(0) != num_tokens.shape(0)) {
    throw py::value_error("token_ids and num_tokens must have the same number of rows");
  }
  const StepResult result{
      .width = static_cast<int32_t>(token_ids.shape(1)),
      .token_ids = {token_ids.data(), static_cast<size_t>(token_ids.size())},
      .num_tokens = {num_tokens.data(), static_cast<size_t>(num_tokens.size())},
  };
  py::gil_scoped_release unlocked;
  auto outcome = scheduler.Settle(StepId(step_id), result);
  if (outcome.ok()) return outcome.value();
  py::gil_scoped_acquire locked;
  throw py::value_error(outcome.status().reason());
}

void BindScheduler(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Scheduler>(m, "Scheduler")
      .def(py::init([](const SchedulerConfig& config) {
             auto scheduler = Scheduler::Create(config);
             Raise(scheduler.ok() ? Status::Ok() : scheduler.status());
             return std::move(scheduler.value());
           }),
           py::arg("config"))
      .def(
          "submit", [](Scheduler& s, const RequestSpec& spec) { Raise(s.Submit(spec)); },
          py::arg("spec"))
      .def(
          "abort", [](Scheduler& s, int64_t id) { return s.Abort(RequestId(id)); },
          py::arg("request_id"))
      .def(
          "plan", [](Scheduler& s) { return std::const_pointer_cast<Plan>(s.MakePlan()); }, NoGil())
      .def(
          "advance",
          [](Scheduler& s, int64_t step_id, const TokenArray& token_ids,
             const TokenArray& num_tokens) {
            return std::const_pointer_cast<Outcome>(AdvanceStep(s, step_id, token_ids, num_tokens));
          },
          py::arg("step_id"), py::arg("token_ids"), py::arg("num_tokens"))
      .def(
          "block_tables",
          [](py::object self, int32_t group) {
            const auto& scheduler = self.cast<const Scheduler&>();
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
          [](Scheduler& s, int64_t id, bool ok, int32_t first_token) {
            auto outcome = s.SettleTransfer(id, ok, first_token);
            Raise(outcome.ok() ? Status::Ok() : outcome.status());
            return std::const_pointer_cast<Outcome>(outcome.value());
          },
          py::arg("transfer_id"), py::arg("ok"), py::arg("first_token"))
      .def(
          "pause",
          [](Scheduler& s, const std::string& mode) {
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
          [](Scheduler& s, int64_t version) { Raise(s.SetWeightVersion(version)); },
          py::arg("version"))
      .def("enable_kv_events", &Scheduler::EnableKvEvents)
      .def("kv_events", &Scheduler::TakeKvEvents)
      .def(
          "stats",
          [](const Scheduler& s, int64_t id) {
            const auto counters = s.CountersOf(RequestId(id));
            if (!counters)
              throw py::value_error("request_id " + std::to_string(id) + " is unknown");
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
