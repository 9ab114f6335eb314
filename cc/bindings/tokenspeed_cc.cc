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
#include "cc/bindings/bind_config.h"
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
  plan.def_property_readonly("load_waits", [](py::object self) {
    const auto& waits = self.cast<const Plan&>().load_waits;
    return View(reinterpret_cast<const int64_t*>(waits.data()),
                {static_cast<py::ssize_t>(waits.size()), py::ssize_t{2}}, self);
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
      .def_readonly("host_tokens", &RequestCounters::host_tokens)
      .def_readonly("store_tokens", &RequestCounters::store_tokens)
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
      .def_readonly("total_blocks", &Load::total_blocks)
      .def_readonly("host_cached_blocks", &Load::host_cached_blocks)
      .def_readonly("host_reserved_blocks", &Load::host_reserved_blocks)
      .def_readonly("host_free_blocks", &Load::host_free_blocks);

  m.attr("TRANSFER_STORE") = static_cast<int>(TransferKind::kStore);
  m.attr("TRANSFER_LOAD") = static_cast<int>(TransferKind::kLoad);
  m.attr("TRANSFER_SEND") = static_cast<int>(TransferKind::kSend);
  m.attr("TRANSFER_RECEIVE") = static_cast<int>(TransferKind::kReceive);
  m.attr("TRANSFER_QUERY") = static_cast<int>(TransferKind::kQuery);
  m.attr("TRANSFER_GET") = static_cast<int>(TransferKind::kGet);
  m.attr("TRANSFER_PUT") = static_cast<int>(TransferKind::kPut);
  m.attr("TRANSFER_CANCEL") = static_cast<int>(TransferKind::kCancel);
  py::class_<Transfer> transfer(m, "Transfer");
  transfer.def_readonly("transfer_id", &Transfer::id)
      .def_property_readonly("kind", [](const Transfer& t) { return static_cast<int>(t.kind); })
      .def_readonly("request_id", &Transfer::request_id)
      .def_readonly("slot", &Transfer::slot)
      .def_readonly("first_token", &Transfer::first_token)
      .def_readonly("num_tokens", &Transfer::num_tokens);
  transfer.def_readonly("target", &Transfer::target)
      .def_readonly("deadline_us", &Transfer::deadline_us);
  DefView(transfer, "hashes", &Transfer::hashes);
  DefView(transfer, "parent_hashes", &Transfer::parent_hashes);
  DefView(transfer, "token_ids", &Transfer::token_ids);
  DefView(transfer, "groups", &Transfer::groups);
  DefView(transfer, "columns", &Transfer::columns);
  DefView(transfer, "device_blocks", &Transfer::device_blocks);
  DefView(transfer, "host_blocks", &Transfer::host_blocks);

  py::class_<StoreCounters>(m, "StoreCounters")
      .def_readonly("num_queries", &StoreCounters::num_queries)
      .def_readonly("num_gets", &StoreCounters::num_gets)
      .def_readonly("num_partial_gets", &StoreCounters::num_partial_gets)
      .def_readonly("hit_tokens", &StoreCounters::hit_tokens)
      .def_readonly("num_puts", &StoreCounters::num_puts)
      .def_readonly("num_timeouts", &StoreCounters::num_timeouts)
      .def_readonly("num_failures", &StoreCounters::num_failures)
      .def_readonly("num_skipped", &StoreCounters::num_skipped);

  py::class_<BlockStored>(m, "BlockStored")
      .def_property_readonly("medium", [](const BlockStored& e) { return MediumName(e.medium); })
      .def_readonly("block_hash", &BlockStored::hash)
      .def_property_readonly("parent_hash",
                             [](const BlockStored& e) -> std::optional<uint64_t> {
                               if (!e.has_parent) return std::nullopt;
                               return e.parent_hash;
                             })
      .def_readonly("token_ids", &BlockStored::token_ids)
      .def(py::pickle(
          [](const BlockStored& e) {
            return py::make_tuple(static_cast<int>(e.medium), e.hash, e.parent_hash, e.has_parent,
                                  e.token_ids);
          },
          [](const py::tuple& t) {
            return BlockStored{static_cast<Medium>(t[0].cast<int>()), t[1].cast<uint64_t>(),
                               t[2].cast<uint64_t>(), t[3].cast<bool>(),
                               t[4].cast<std::vector<int32_t>>()};
          }));
  py::class_<BlockRemoved>(m, "BlockRemoved")
      .def_property_readonly("medium", [](const BlockRemoved& e) { return MediumName(e.medium); })
      .def_readonly("block_hash", &BlockRemoved::hash)
      .def(py::pickle(
          [](const BlockRemoved& e) { return py::make_tuple(static_cast<int>(e.medium), e.hash); },
          [](const py::tuple& t) {
            return BlockRemoved{static_cast<Medium>(t[0].cast<int>()), t[1].cast<uint64_t>()};
          }));
  py::class_<AllBlocksCleared>(m, "AllBlocksCleared")
      .def(py::init<>())
      .def(py::pickle([](const AllBlocksCleared&) { return py::make_tuple(); },
                      [](const py::tuple&) { return AllBlocksCleared{}; }));
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
             const py::object& first_token, const py::object& given) {
            const std::vector<uint8_t> done = Bits(given, "done");
            const TransferResult result{Flag(ok, "ok"),
                                        Integer<int32_t>(first_token, "first_token"), done};
            auto outcome = s.SettleTransfer(Integer<int64_t>(id, "transfer_id"), result);
            Raise(outcome.ok() ? Status::Ok() : outcome.status());
            return std::const_pointer_cast<Outcome>(outcome.value());
          },
          py::arg("transfer_id"), py::arg("ok"), py::arg("first_token"),
          py::arg("done") = py::none())
      .def(
          "transfer_progress",
          [](Scheduler& s, const py::object& id, const py::object& layers_done) {
            Raise(s.ProgressTransfer(Integer<int64_t>(id, "transfer_id"),
                                     Integer<int32_t>(layers_done, "layers_done")));
          },
          py::arg("transfer_id"), py::arg("layers_done"))
      .def(
          "advance_clock",
          [](Scheduler& s, const py::object& now_us) {
            Raise(s.AdvanceClock(Integer<int64_t>(now_us, "now_us")));
          },
          py::arg("now_us"))
      .def("store_counters", [](const Scheduler& s) { return s.store_counters(); })
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
