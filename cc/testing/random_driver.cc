// SPDX-License-Identifier: MIT

#include "cc/testing/random_driver.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <utility>

#include "cc/base/hash.h"
#include "cc/scheduler/scheduler.h"
#include "cc/testing/device_model.h"
#include "cc/testing/event_forest.h"
#include "cc/testing/plan_ints.h"
#include "cc/testing/prompt_work.h"

namespace tokenspeed::testing {
namespace {

constexpr int32_t kEos = 2;
constexpr int kMaxStillSteps = 4;
constexpr size_t kMaxLive = 40;  // beyond this a submit settles instead: queues need not grow

void Require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

class Run {
 public:
  Run(const SchedulerConfig& config, Fault fault)
      : config_(config),
        fault_(fault),
        scheduler_(std::move(Scheduler::Create(config).value())),
        mirror_(std::move(Scheduler::Create(config).value())),
        device_(config) {
    scheduler_->EnableKvEvents();  // the mirror does without
  }

  void Do(const Move& move) {
    constexpr int kNumKinds = 20;
    const int kind = move.kind % kNumKinds;
    if (kind < 4) return num_live_ < kMaxLive ? Submit(move) : Settle();
    if (kind < 9) return void(PlanStep(move));
    if (kind < 13) return Settle();
    if (kind < 15) return SettleTransfer(move);
    if (kind < 16) return Abort(move);
    if (kind < 17) return move.a % 4 == 0 ? Flush() : PauseOrResume(move);
    if (kind < 18) return move.a % 8 == 0 ? ChangeWeights(move) : Refused(move);
    if (kind < 19) return Refused(move);
    if (PlanStep(move)) Settle();
  }

  void Check() {
    scheduler_->CheckInvariants();
    events_.Apply(scheduler_->TakeKvEvents());
    const auto blocks = static_cast<size_t>(scheduler_->load().total_blocks);
    Require(events_.num_device() <= blocks, "no more blocks are told than there are");
  }

  // Lets everything run out: whatever happened before, all work must end.
  void Drain() {
    Resume();
    for (int still = 0; scheduler_->HasWork();) {
      const bool planned = PlanStep({0, 1, 0});
      const bool settled = !in_flight_.empty() || !copying_.empty();
      Settle();
      SettleTransfer({0, 1, 0});
      Check();
      still = planned || settled ? 0 : still + 1;
      Require(still < kMaxStillSteps, "work exists and nothing moves");
    }
    Require(num_live_ == 0, "every request ends");
    while (!copying_.empty()) SettleTransfer({0, 1, 0});
    Check();
    Require(scheduler_->load().active_blocks == 0, "no block is held when nothing runs");
    Require(!mirror_->HasWork(), "the mirror ends with its twin");
  }

  Report Count() const {
    Report report;
    report.num_steps = num_steps_;
    report.num_tokens = num_tokens_;
    report.num_retractions = num_retractions_;
    report.num_cached_tokens = num_cached_tokens_;
    report.num_transfers = num_transfers_;
    report.num_refusals = num_refusals_;
    report.num_steps_behind_loads = num_steps_behind_loads_;
    report.store = scheduler_->store_counters();
    return report;
  }

 private:
  struct InFlight {
    std::shared_ptr<const Plan> plan;
    int32_t accepted;
    DeviceModel::StepTokens tokens = {};
    bool ran = false;
    std::set<int64_t> spoilt = {};  // requests whose load failed under it
  };
  struct Known {
    int32_t max_new_tokens;
    int64_t prompt_tokens;
    int64_t num_output = 0;
    bool lives = true;
    int64_t prefill_since_token = -1;  // work planned; -1: no token since it last came
  };

  RequestSpec SpecFrom(const Move& move, int64_t id) const {
    // Few families, lengths over all sizes: shared prefixes, diverging tails, exact repeats.
    const int32_t family = move.a % 3;
    const int32_t length = 1 + move.b % 30;
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < length; ++i) tokens.push_back(10 + family * 100 + i);
    if (move.a % 5 == 0) tokens.back() = 7 + move.b % 3;
    RequestSpec spec{
        RequestId(id),  std::move(tokens),        1 + (move.a / 3) % 18,   0, {}, move.b % 7 == 0,
        move.b % 3 - 1, move.a % 11 == 0 ? 1 : 0, move.a % 13 == 0 ? 1 : 0};
    spec.min_new_tokens = move.b % 5 == 0 ? spec.max_new_tokens / 2 : 0;
    return spec;
  }

  void Submit(const Move& move) {
    // Now and then the number of a request that has ended, maybe with rows of it still in flight.
    const bool again = move.b % 16 == 5 && last_ended_ >= 0 && config_.role != Role::kDecode &&
                       std::ranges::all_of(in_flight_, &InFlight::ran);
    const int64_t id = again ? std::exchange(last_ended_, -1) : next_id_++;
    RequestSpec spec = SpecFrom(move, id);
    const auto prompt = static_cast<int64_t>(spec.token_ids.size());
    const bool fits = prompt + spec.max_new_tokens <= config_.max_model_len &&
                      (config_.chunked_prefill || prompt <= config_.max_batched_tokens);
    Require(mirror_->Submit(spec).ok() == fits, "exactly what cannot fit is refused");
    if (fits) {
      device_.Know(spec);
      requests_.insert_or_assign(id, Known{spec.max_new_tokens, prompt});
      ++num_live_;
    }
    Require(scheduler_->Submit(std::move(spec)).ok() == fits, "exactly what cannot fit is refused");
  }

  void Tick(int64_t us) {
    now_us_ += us;
    Require(scheduler_->AdvanceClock(now_us_).ok(), "time goes on");
    Require(mirror_->AdvanceClock(now_us_).ok(), "time goes on");
    TakeTransfers();
  }

  bool PlanStep(const Move& move) {
    if (config_.store.enabled) Tick(move.b % 24);
    if (paused_ && move.b % 4 == 1) Resume();
    auto plan = scheduler_->MakePlan();
    const auto twin = mirror_->MakePlan();
    Require((plan == nullptr) == (twin == nullptr), "same events, same plans");
    TakeTransfers();
    if (!plan) {
      const bool waits = !in_flight_.empty() || !copying_.empty() || paused_;
      Require(waits || !scheduler_->HasWork(), "with nothing in flight, work can be planned");
      return false;
    }
    RequireSame(*plan, *twin);
    CheckBudget(*plan);
    CheckGap(*plan);
    ++num_steps_;
    ++steps_without_token_;
    const int32_t accepted = 1 + move.a % config_.verify_width;
    num_steps_behind_loads_ += plan->load_waits.empty() ? 0 : 1;
    in_flight_.push_back({std::move(plan), accepted});
    RunLaunched();
    return true;
  }

  // Steps run in their order, each behind the loads that it waits for.
  void RunLaunched() {
    const auto loads = [&](const LoadWait& wait) {
      return std::ranges::any_of(copying_,
                                 [&](const Transfer& t) { return t.id == wait.transfer_id; });
    };
    for (InFlight& step : in_flight_) {
      if (step.ran) continue;
      if (std::ranges::any_of(step.plan->load_waits, loads)) return;
      step.tokens =
          device_.Run(Damaged(*step.plan), *scheduler_, step.accepted, TokenFor, step.spoilt);
      step.ran = true;
    }
  }

  void SpoilBehind(const Transfer& load) {
    for (InFlight& step : in_flight_) {
      const auto waits = [&](const LoadWait& wait) { return wait.transfer_id == load.id; };
      if (std::ranges::any_of(step.plan->load_waits, waits)) step.spoilt.insert(load.request_id);
    }
  }

  // A step that runs behind a load has no result before the load has.
  void SettleTooEarly() {
    const Plan& plan = *in_flight_.front().plan;
    const std::vector<int32_t> ones(static_cast<size_t>(plan.num_rows()), 1);
    const auto refused = scheduler_->Settle(StepId(plan.step_id), {1, ones, ones});
    Require(!refused.ok(), "a step does not settle before the load that it runs behind");
  }

  Plan Damaged(const Plan& plan) const {
    Plan damaged = plan;
    if (fault_ == Fault::kForgetsCopies) damaged.block_copies.clear();
    if (fault_ == Fault::kForgetsTableUpdates && plan.step_id % 3 == 2)
      damaged.table_updates.clear();
    return damaged;
  }

  // Now and then the end of sequence; always the same for a request and a position.
  static int32_t TokenFor(int64_t id, int64_t position) {
    const uint64_t noise = HashCombine(static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    return noise % 16 == 0 ? kEos : static_cast<int32_t>(10 + noise % 50);
  }

  static void RequireSame(const Plan& a, const Plan& b) {
    Require(AsInts(a) == AsInts(b), "same events, same plans");
  }

  void CheckBudget(const Plan& plan) const {
    int32_t total = 0;
    for (const int32_t length : plan.query_lens) {
      Require(length > 0, "a row computes something");
      total += length;
    }
    Require(total <= config_.max_batched_tokens, "a step keeps to max_batched_tokens");
    Require(plan.num_rows() <= config_.max_num_seqs, "no more rows than max_num_seqs");
    std::set<int64_t> rows(plan.request_ids.begin(), plan.request_ids.end());
    Require(rows.size() == plan.request_ids.size(), "a request has one row in a step");
  }

  // Work on prompts between two tokens of a request that goes on running; the first comes with the
  // last chunk. Prompts that go whole, as `chunked_prefill` off asks, are the exception.
  void CheckGap(const Plan& plan) {
    const int64_t prefill = PromptWork(plan, config_.context_cost_tokens);
    for (const int64_t id : plan.new_slot_request_ids) requests_.at(id).prefill_since_token = -1;
    for (auto& [id, request] : requests_) {
      if (request.prefill_since_token >= 0) request.prefill_since_token += prefill;
    }
    for (size_t row = 0; row < plan.samples.size(); ++row) {
      if (plan.samples[row] == 0) continue;
      int64_t& since = requests_.at(plan.request_ids[row]).prefill_since_token;
      Require(!config_.chunked_prefill || since <= config_.max_decode_gap_tokens,
              "between two tokens lie at most max_decode_gap_tokens of work on prompts");
      since = 0;
    }
  }

  void Settle() {
    if (in_flight_.empty()) return;
    if (!in_flight_.front().ran) {
      if (!in_flight_.front().plan->load_waits.empty()) SettleTooEarly();
      return;
    }
    const InFlight step = std::move(in_flight_.front());
    in_flight_.pop_front();
    const StepResult result{config_.verify_width, step.tokens.token_ids, step.tokens.num_tokens};
    const StepId id(step.plan->step_id);
    const auto outcome = scheduler_->Settle(id, result).value();
    (void)mirror_->Settle(id, result).value();
    if (fault_ != Fault::kPublishesTooEarly || id.value() % 3 != 2) device_.Settle(step.tokens);
    Take(*outcome);
    TakeTransfers();
    Require(steps_without_token_ <= config_.max_model_len * config_.max_num_seqs + 8,
            "some request advances while steps run");
  }

  void Take(const Outcome& outcome) {
    for (size_t i = 0; i < outcome.request_ids.size(); ++i) {
      const int64_t id = outcome.request_ids[i];
      Known& request = requests_.at(id);
      Require(request.lives, "nothing is told of a request after its end");
      request.num_output += outcome.num_tokens[i];
      Require(request.num_output == outcome.completion_tokens[i], "every token is emitted once");
      Require(request.num_output <= request.max_new_tokens, "no more than max_new_tokens");
      num_tokens_ += outcome.num_tokens[i];
      steps_without_token_ = 0;
      if (outcome.finish[i] != 0) End(id);
    }
  }

  void End(int64_t id) {
    const auto counters = scheduler_->CountersOf(RequestId(id));
    if (!counters) throw std::logic_error("the counters of a request outlive it");
    num_retractions_ += counters->num_retractions;
    num_cached_tokens_ += counters->cached_tokens;
    Known& request = requests_.at(id);
    Require(request.lives, "one terminal event a request");
    request.lives = false;
    request.prefill_since_token = -1;
    last_ended_ = id;
    --num_live_;
    ended_.push_back(id);
    if (ended_.size() > 4 * kMaxLive) Forget();
  }

  // Long runs forget who ended long ago; steps in flight never go back that far, transfers may.
  void Forget() {
    const auto old = requests_.find(ended_.front());
    ended_.pop_front();
    if (old == requests_.end() || old->second.lives) return;
    const auto is_of_old = [&](const Transfer& t) { return t.request_id == old->first; };
    if (std::ranges::any_of(copying_, is_of_old)) return ended_.push_back(old->first);
    device_.Forget(old->first);
    requests_.erase(old);
  }

  void TakeTransfers() {
    const auto twins = mirror_->TakeTransfers();
    auto fresh = scheduler_->TakeTransfers();
    Require(fresh.size() == twins.size(), "same events, same transfers");
    for (size_t i = 0; i < fresh.size(); ++i) {
      Require(fresh[i].id == twins[i].id && fresh[i].kind == twins[i].kind &&
                  fresh[i].device_blocks == twins[i].device_blocks &&
                  fresh[i].host_blocks == twins[i].host_blocks &&
                  fresh[i].groups == twins[i].groups && fresh[i].columns == twins[i].columns &&
                  fresh[i].hashes == twins[i].hashes && fresh[i].target == twins[i].target,
              "same events, same transfers");
      device_.Order(fresh[i]);
      if (fresh[i].kind != TransferKind::kCancel) copying_.push_back(std::move(fresh[i]));
      ++num_transfers_;
    }
  }

  void Progress(const Move& move) {
    for (const Transfer& transfer : copying_) {
      if (transfer.kind != TransferKind::kLoad) continue;
      const int32_t layers = move.a % (config_.num_layers + 1);
      const bool ok = scheduler_->ProgressTransfer(transfer.id, layers).ok();
      Require(mirror_->ProgressTransfer(transfer.id, layers).ok() == ok,
              "same events, same answers");
    }
  }

  void SettleTransfer(const Move& move) {
    if (copying_.empty()) return;
    if (move.a % 3 == 0) return Progress({move.kind, static_cast<uint8_t>(move.a / 3), move.b});
    const auto at = copying_.begin() + move.a % static_cast<std::ptrdiff_t>(copying_.size());
    const Transfer transfer = std::move(*at);
    copying_.erase(at);
    const bool ok = move.b % 8 != 7;
    std::vector<uint8_t> done;
    if (transfer.kind > TransferKind::kReceive) {
      done = device_.FinishStore(transfer, ok, move.b);
    } else {
      device_.Finish(transfer, ok);
    }
    if (transfer.kind == TransferKind::kLoad && !ok) SpoilBehind(transfer);
    RunLaunched();
    int32_t first_token = -1;
    if (transfer.kind == TransferKind::kReceive && ok) {
      first_token = TokenFor(transfer.request_id, transfer.num_tokens);
      device_.Sampled(transfer.request_id, first_token);
    }
    const auto outcome = scheduler_->SettleTransfer(transfer.id, {ok, first_token, done}).value();
    (void)mirror_->SettleTransfer(transfer.id, {ok, first_token, done}).value();
    Take(*outcome);
    TakeTransfers();
  }

  void PauseOrResume(const Move& move) {
    if (paused_) return Resume();
    const auto mode = static_cast<PauseMode>(move.b % 3);
    for (const Ended& end : scheduler_->Pause(mode)) End(end.request_id);
    (void)mirror_->Pause(mode);
    paused_ = true;
  }

  void Resume() {
    scheduler_->Resume();
    mirror_->Resume();
    paused_ = false;
  }

  void Abort(const Move& move) {
    if (next_id_ == 0) return;
    const int64_t id = next_id_ - 1 - move.a % next_id_;
    const auto known = requests_.find(id);
    const bool lives = known != requests_.end() && known->second.lives;
    Require(scheduler_->Abort(RequestId(id)).has_value() == lives,
            "exactly a live request can be aborted");
    if (fault_ != Fault::kMirrorMissesAborts) (void)mirror_->Abort(RequestId(id));
    steps_without_token_ = 0;  // its work is lost, and nobody's fault
    if (lives) End(id);
  }

  void Flush() {
    const bool flushed = scheduler_->FlushCache();
    Require(mirror_->FlushCache() == flushed, "same events, same answers");
    if (!flushed) return;
    const Load load = scheduler_->load();
    Require(load.free_blocks == load.total_blocks, "a flush forgets everything");
    device_.ForgetSettled();
  }

  void ChangeWeights(const Move& move) {
    // Steps that are launched and wait for a load run on the weights that they were launched with.
    if (!std::ranges::all_of(in_flight_, &InFlight::ran)) return;
    const int64_t version = move.b % 3;
    Require(scheduler_->SetWeightVersion(version).ok(), "a version is accepted");
    Require(mirror_->SetWeightVersion(version).ok(), "a version is accepted");
    device_.SetWeightVersion(version);
  }

  // A call that must be refused. The mirror does not hear of it, so it must have changed nothing.
  void Refused(const Move& move) {
    Require(IsRefused(move), "a bad call is refused");
    ++num_refusals_;
  }

  bool IsRefused(const Move& move) {
    RequestSpec spec = SpecFrom(move, next_id_ + 1'000'000);
    const int kind = move.b % 8;
    if (kind == 0) return spec.token_ids.clear(), !scheduler_->Submit(spec).ok();
    if (kind == 1) return spec.token_ids.back() = -1, !scheduler_->Submit(spec).ok();
    if (kind == 2) return spec.max_new_tokens = -move.a, !scheduler_->Submit(spec).ok();
    if (kind == 3) return spec.max_new_tokens = 48 + move.a, !scheduler_->Submit(spec).ok();
    if (kind == 4) return !scheduler_->SetWeightVersion(-1 - move.a).ok();
    if (kind == 5) return !scheduler_->SettleTransfer(1'000'000'000 + move.a, {true, 1, {}}).ok();
    if (kind == 6) return IsDuplicateRefused(std::move(spec)) && IsResultRefused(move);
    return !scheduler_->Abort(RequestId(next_id_ + move.a)).has_value();
  }

  bool IsDuplicateRefused(RequestSpec spec) {
    for (const auto& [id, request] : requests_) {
      if (!request.lives) continue;
      spec.id = RequestId(id);
      return !scheduler_->Submit(std::move(spec)).ok();
    }
    return true;
  }

  bool IsResultRefused(const Move& move) {
    std::vector<int32_t> tokens = {1, 1, 1};
    const std::vector<int32_t> counts = {1};
    if (in_flight_.empty()) return !scheduler_->Settle(StepId(0), {3, tokens, counts}).ok();
    const InFlight& step = in_flight_.front();
    const StepId id(step.plan->step_id);
    std::vector<int32_t> numbers = step.tokens.num_tokens;
    tokens = step.tokens.token_ids;
    const int32_t width = config_.verify_width;
    if (!scheduler_->Settle(StepId(id.value() + 1 + move.a), {width, tokens, numbers}).ok()) {
      numbers.push_back(1);
      return !scheduler_->Settle(id, {width, tokens, numbers}).ok() &&
             !scheduler_->Settle(id, {0, {}, step.tokens.num_tokens}).ok();
    }
    return false;
  }

  const SchedulerConfig config_;
  const Fault fault_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Scheduler> mirror_;
  DeviceModel device_;
  EventForest events_;
  std::deque<InFlight> in_flight_;
  std::vector<Transfer> copying_;
  int64_t now_us_ = 0;
  bool paused_ = false;
  std::map<int64_t, Known> requests_;
  std::deque<int64_t> ended_;  // oldest first
  int64_t last_ended_ = -1;
  size_t num_live_ = 0;
  int64_t next_id_ = 0;
  int64_t steps_without_token_ = 0;
  int64_t num_steps_ = 0;
  int64_t num_tokens_ = 0;
  int64_t num_retractions_ = 0;
  int64_t num_cached_tokens_ = 0;
  int64_t num_transfers_ = 0;
  int64_t num_refusals_ = 0;
  int64_t num_steps_behind_loads_ = 0;
};

}  // namespace

Report Replay(const Scenario& scenario, Fault fault) {
  Run run(ConfigFrom(scenario.knobs), fault);
  std::optional<std::string> failure;
  int at = -1;
  try {
    for (const Move& move : scenario.moves) {
      ++at;
      run.Do(move);
      run.Check();
    }
    ++at;
    run.Drain();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Report report = run.Count();
  report.failed_move = failure ? at : -1;
  report.failure = std::move(failure);
  return report;
}

}  // namespace tokenspeed::testing
