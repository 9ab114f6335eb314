// SPDX-License-Identifier: MIT

#include "cc/testing/random_driver.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "cc/base/hash.h"
#include "cc/scheduler/scheduler.h"
#include "cc/testing/device_model.h"

namespace tokenspeed::testing {
namespace {

constexpr int32_t kEos = 2;
constexpr int kMaxStillSteps = 4;

class Knobs {
 public:
  explicit Knobs(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}
  int32_t Pick(int32_t low, int32_t high) {
    const uint8_t byte = at_ < bytes_.size() ? bytes_[at_++] : 0;
    return low + byte % (high - low + 1);
  }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
};

// A window, a state, or both beside the full history, in parents of several blocks; and room for
// them.
void AddGroups(SchedulerConfig& config, Knobs& knobs) {
  config.role = Role::kFused;
  config.num_host_blocks = 0;
  config.verify_width = 1;
  config.groups[0].blocks_per_parent = knobs.Pick(1, 3);
  const int32_t kinds = knobs.Pick(1, 3);
  if (kinds != 2)
    config.groups.push_back({GroupKind::kWindow, knobs.Pick(1, 4), knobs.Pick(1, 20), 0});
  if (kinds != 1) {
    config.groups.push_back(
        {GroupKind::kState, knobs.Pick(1, 3), 0, config.block_size * knobs.Pick(1, 3)});
  }
  config.num_blocks *= 2;
}

SchedulerConfig ConfigFrom(const std::vector<uint8_t>& bytes) {
  Knobs knobs(bytes);
  SchedulerConfig config{};
  config.overlap_depth = knobs.Pick(0, 3);
  config.block_size = knobs.Pick(1, 5);
  config.max_model_len = 48;
  const int32_t enough = (config.max_model_len + config.block_size - 1) / config.block_size;
  config.num_blocks = 1 + enough + knobs.Pick(0, 24);
  config.max_num_seqs = knobs.Pick(1, 6);
  config.verify_width = knobs.Pick(0, 3) == 0 ? knobs.Pick(2, 4) : 1;
  config.chunked_prefill = knobs.Pick(0, 3) != 0;
  config.max_batched_tokens = config.max_num_seqs * config.verify_width + knobs.Pick(0, 31);
  if (!config.chunked_prefill) config.max_batched_tokens += config.max_model_len;
  config.max_decode_gap_tokens = knobs.Pick(1, 40);
  config.enable_prefix_caching = knobs.Pick(0, 7) != 0;
  config.eos_token_ids = {kEos};
  config.role = static_cast<Role>(std::max(0, knobs.Pick(0, 5) - 3));
  config.num_host_blocks = config.enable_prefix_caching ? std::max(0, knobs.Pick(0, 30) - 10) : 0;
  config.groups = {{GroupKind::kFull, 1, 0, 0}};
  if (knobs.Pick(0, 2) == 0) AddGroups(config, knobs);
  return config;
}

void Require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

class Run {
 public:
  explicit Run(const SchedulerConfig& config)
      : config_(config),
        scheduler_(std::move(Scheduler::Create(config).value())),
        mirror_(std::move(Scheduler::Create(config).value())),
        device_(config) {}

  void Do(const Move& move) {
    switch (move.kind % 16) {
      case 0:
      case 1:
      case 2:
        return Submit(move);
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
        Plan_(move);
        return;
      case 8:
      case 9:
      case 10:
        return Settle();
      case 11:
      case 12:
        return SettleTransfer(move);
      case 13:
        return Abort(move);
      case 14:
        return move.a % 4 == 0 ? Flush() : PauseOrResume(move);
      case 15:
        return move.a % 8 == 0 ? ChangeWeights(move) : void();
    }
  }

  void Check() {
    scheduler_->CheckInvariants();
    for (const auto& [id, request] : requests_) {
      Require(request.num_ends <= 1, "one terminal event a request");
    }
  }

  // Lets everything run out: whatever happened before, all work must end.
  void Drain() {
    Resume();
    for (int still = 0; scheduler_->HasWork();) {
      const bool planned = Plan_({0, 1, 0});
      const bool settled = !in_flight_.empty() || !copying_.empty();
      Settle();
      SettleTransfer({0, 1, 0});
      Check();
      still = planned || settled ? 0 : still + 1;
      Require(still < kMaxStillSteps, "work exists and nothing moves");
    }
    for (const auto& [id, request] : requests_)
      Require(request.num_ends == 1, "every request ends");
    while (!copying_.empty()) SettleTransfer({0, 1, 0});
    Check();
    Require(scheduler_->load().active_blocks == 0, "no block is held when nothing runs");
    Require(!mirror_->HasWork(), "the mirror ends with its twin");
  }

  void CountInto(Report& report) const {
    report.num_steps = num_steps_;
    for (const auto& [id, request] : requests_) {
      const auto counters = scheduler_->CountersOf(RequestId(id));
      if (!counters) continue;
      report.num_retractions += counters->num_retractions;
      report.num_cached_tokens += counters->cached_tokens;
    }
  }

 private:
  struct InFlight {
    std::shared_ptr<const Plan> plan;
    DeviceModel::StepTokens tokens;
  };
  struct Known {
    int32_t max_new_tokens;
    int64_t prompt_tokens;
    int64_t num_output = 0;
    int num_ends = 0;
  };

  void Submit(const Move& move) {
    // Few families, lengths over all sizes: shared prefixes, diverging tails, exact repeats.
    const int32_t family = move.a % 3;
    const int32_t length = 1 + move.b % 30;
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < length; ++i) tokens.push_back(10 + family * 100 + i);
    if (move.a % 5 == 0) tokens.back() = 7 + move.b % 3;
    RequestSpec spec{RequestId(next_id_),
                     std::move(tokens),
                     1 + (move.a / 3) % 18,
                     0,
                     {},
                     move.b % 7 == 0,
                     move.b % 3 - 1,
                     move.a % 11 == 0 ? 1 : 0,
                     move.a % 13 == 0 ? 1 : 0};
    spec.min_new_tokens = move.b % 5 == 0 ? spec.max_new_tokens / 2 : 0;
    const auto prompt = static_cast<int64_t>(spec.token_ids.size());
    const bool fits = prompt + spec.max_new_tokens <= config_.max_model_len &&
                      (config_.chunked_prefill || prompt <= config_.max_batched_tokens);
    const Known known{spec.max_new_tokens, prompt};
    device_.Know(spec);
    Require(mirror_->Submit(spec).ok() == fits, "exactly what cannot fit is refused");
    Require(scheduler_->Submit(std::move(spec)).ok() == fits, "exactly what cannot fit is refused");
    if (fits) requests_.emplace(next_id_, known);
    ++next_id_;
  }

  bool Plan_(const Move& move) {
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
    ++num_steps_;
    const int32_t accepted = 1 + move.a % config_.verify_width;
    auto tokens = device_.Run(*plan, *scheduler_, accepted, TokenFor);
    in_flight_.push_back({std::move(plan), std::move(tokens)});
    return true;
  }

  // Now and then the end of sequence; always the same for a request and a position.
  static int32_t TokenFor(int64_t id, int64_t position) {
    const uint64_t noise = HashCombine(static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    return noise % 16 == 0 ? kEos : static_cast<int32_t>(10 + noise % 50);
  }

  void RequireSame(const Plan& a, const Plan& b) {
    const auto as_ints = [](const Plan& plan) {
      std::vector<int64_t> all = {plan.step_id, plan.num_decode_rows};
      const auto add = [&](const auto& values) {
        all.insert(all.end(), values.begin(), values.end());
      };
      add(plan.request_ids), add(plan.slots), add(plan.query_lens), add(plan.context_lens);
      add(plan.samples), add(plan.prompt_token_ids), add(plan.new_slots),
          add(plan.new_slot_request_ids);
      for (const BlockCopy& copy : plan.block_copies) add(std::vector{copy.from, copy.to});
      for (const TableUpdate& u : plan.table_updates) add(std::vector{u.slot, u.column, u.block});
      for (const GroupPlan& group : plan.groups) {
        for (const BlockCopy& copy : group.copies) add(std::vector{copy.from, copy.to});
        for (const BlockCopy& save : group.saves) add(std::vector{save.from, save.to});
        for (const TableUpdate& u : group.table_updates)
          add(std::vector{u.slot, u.column, u.block});
      }
      return all;
    };
    Require(as_ints(a) == as_ints(b), "same events, same plans");
  }

  void CheckBudget(const Plan& plan) {
    int32_t total = 0;
    for (const int32_t length : plan.query_lens) total += length;
    Require(total <= config_.max_batched_tokens, "a step keeps to max_batched_tokens");
    const auto prefill = static_cast<int32_t>(plan.prompt_token_ids.size());
    Require(plan.num_decode_rows == 0 || prefill <= config_.max_decode_gap_tokens,
            "a step with decodes keeps to max_decode_gap_tokens");
    Require(plan.num_rows() <= config_.max_num_seqs, "no more rows than max_num_seqs");
  }

  void Settle() {
    if (in_flight_.empty()) return;
    const InFlight step = std::move(in_flight_.front());
    in_flight_.pop_front();
    const StepResult result{config_.verify_width, step.tokens.token_ids, step.tokens.num_tokens};
    const StepId id(step.plan->step_id);
    const auto outcome = scheduler_->Settle(id, result).value();
    (void)mirror_->Settle(id, result).value();
    Take(*outcome);
    TakeTransfers();
  }

  void Take(const Outcome& outcome) {
    for (size_t i = 0; i < outcome.request_ids.size(); ++i) {
      Known& request = requests_.at(outcome.request_ids[i]);
      Require(request.num_ends == 0, "nothing is told of a request after its end");
      request.num_output += outcome.num_tokens[i];
      request.num_ends += outcome.finish[i] != 0 ? 1 : 0;
      Require(request.num_output == outcome.completion_tokens[i], "every token is emitted once");
      Require(request.num_output <= request.max_new_tokens, "no more than max_new_tokens");
    }
  }

  void TakeTransfers() {
    const auto twins = mirror_->TakeTransfers();
    auto fresh = scheduler_->TakeTransfers();
    Require(fresh.size() == twins.size(), "same events, same transfers");
    for (size_t i = 0; i < fresh.size(); ++i) {
      Require(fresh[i].id == twins[i].id && fresh[i].device_blocks == twins[i].device_blocks &&
                  fresh[i].host_blocks == twins[i].host_blocks,
              "same events, same transfers");
      device_.Order(fresh[i], *scheduler_);
      copying_.push_back(std::move(fresh[i]));
    }
  }

  void SettleTransfer(const Move& move) {
    if (copying_.empty()) return;
    const auto at = copying_.begin() + move.a % static_cast<std::ptrdiff_t>(copying_.size());
    const Transfer transfer = std::move(*at);
    copying_.erase(at);
    const bool ok = move.b % 8 != 7;
    device_.Finish(transfer, ok);
    int32_t first_token = -1;
    if (transfer.kind == TransferKind::kReceive && ok) {
      first_token = TokenFor(transfer.request_id, transfer.num_tokens);
      device_.Sampled(transfer.request_id, first_token);
    }
    const auto outcome = scheduler_->SettleTransfer(transfer.id, ok, first_token).value();
    (void)mirror_->SettleTransfer(transfer.id, ok, first_token).value();
    Take(*outcome);
    TakeTransfers();
  }

  void PauseOrResume(const Move& move) {
    if (paused_) return Resume();
    const auto mode = static_cast<PauseMode>(move.b % 3);
    for (const Ended& end : scheduler_->Pause(mode)) requests_.at(end.request_id).num_ends += 1;
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
    const bool lives = known != requests_.end() && known->second.num_ends == 0;
    Require(scheduler_->Abort(RequestId(id)).has_value() == lives,
            "exactly a live request can be aborted");
    (void)mirror_->Abort(RequestId(id));
    if (lives) known->second.num_ends += 1;
  }

  void Flush() {
    const bool flushed = scheduler_->FlushCache();
    Require(mirror_->FlushCache() == flushed, "same events, same answers");
    const Load load = scheduler_->load();
    if (flushed) Require(load.free_blocks == load.total_blocks, "a flush forgets everything");
  }

  void ChangeWeights(const Move& move) {
    if (!in_flight_.empty()) return;  // the engine changes weights between steps
    const int64_t version = move.b % 3;
    Require(scheduler_->SetWeightVersion(version).ok(), "a version is accepted");
    Require(mirror_->SetWeightVersion(version).ok(), "a version is accepted");
    device_.SetWeightVersion(version);
  }

  const SchedulerConfig config_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Scheduler> mirror_;
  DeviceModel device_;
  std::deque<InFlight> in_flight_;
  std::vector<Transfer> copying_;
  bool paused_ = false;
  std::map<int64_t, Known> requests_;
  int64_t next_id_ = 0;
  int64_t num_steps_ = 0;
};

}  // namespace

Scenario RandomScenario(uint64_t seed, int num_moves) {
  std::mt19937_64 rng(seed);
  Scenario scenario;
  for (int i = 0; i < 24; ++i) scenario.knobs.push_back(static_cast<uint8_t>(rng()));
  for (int i = 0; i < num_moves; ++i) {
    scenario.moves.push_back(
        {static_cast<uint8_t>(rng()), static_cast<uint8_t>(rng()), static_cast<uint8_t>(rng())});
  }
  return scenario;
}

Scenario ScenarioFromBytes(const uint8_t* data, size_t size) {
  Scenario scenario;
  size_t at = 0;
  while (at < size && at < 24) scenario.knobs.push_back(data[at++]);
  for (; at + 3 <= size; at += 3) scenario.moves.push_back({data[at], data[at + 1], data[at + 2]});
  return scenario;
}

Report Replay(const Scenario& scenario) {
  Report report;
  Run run(ConfigFrom(scenario.knobs));
  try {
    for (const Move& move : scenario.moves) {
      ++report.failed_move;
      run.Do(move);
      run.Check();
    }
    run.Drain();
    report.failed_move = -1;
  } catch (const std::exception& error) {
    report.failure = error.what();
  }
  run.CountInto(report);
  return report;
}

Scenario Shrink(Scenario scenario) {
  for (size_t chunk = std::max<size_t>(1, scenario.moves.size() / 2); chunk > 0; chunk /= 2) {
    for (size_t at = 0; at < scenario.moves.size();) {
      Scenario smaller = scenario;
      const auto begin = smaller.moves.begin() + static_cast<std::ptrdiff_t>(at);
      const auto count = std::min(chunk, smaller.moves.size() - at);
      smaller.moves.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
      if (Replay(smaller).failure) {
        scenario = std::move(smaller);
      } else {
        at += chunk;
      }
    }
  }
  return scenario;
}

std::string ToSource(const Scenario& scenario) {
  std::ostringstream text;
  text << "Scenario{{";
  for (const uint8_t knob : scenario.knobs) text << int{knob} << ", ";
  text << "}, {";
  for (const Move& move : scenario.moves) {
    text << "{" << int{move.kind} << ", " << int{move.a} << ", " << int{move.b} << "}, ";
  }
  text << "}}";
  return text.str();
}

}  // namespace tokenspeed::testing
