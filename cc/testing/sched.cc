// SPDX-License-Identifier: MIT

#include "cc/testing/sched.h"

#include <algorithm>
#include <stdexcept>

namespace tokenspeed::testing {

std::vector<int32_t> Tokens(int family, int32_t count) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i) tokens.push_back(1000 * (family + 1) + i);
  return tokens;
}

int32_t Sched::DefaultToken(int64_t id, int64_t output_number) {
  return static_cast<int32_t>(500'000 + 1000 * (id % 1000) + output_number);
}

Scheduler& Sched::get() {
  if (!scheduler_) scheduler_ = std::move(Scheduler::Create(config_).value());
  return *scheduler_;
}

Sched& Sched::submit(const Ask& ask) {
  if (Status status = try_submit(ask); !status.ok()) throw std::invalid_argument(status.reason());
  prompt_lens_[ask.spec().id.value()] = static_cast<int32_t>(ask.spec().token_ids.size());
  return *this;
}

std::shared_ptr<const Plan> Sched::plan() {
  auto plan = get().MakePlan();
  if (plan) in_flight_.push_back(plan);
  get().CheckInvariants();
  return plan;
}

int32_t Sched::TokenFor(int64_t id, int64_t output_number) const {
  const auto script = scripts_.find(id);
  if (script == scripts_.end() || output_number >= static_cast<int64_t>(script->second.size())) {
    return DefaultToken(id, output_number);
  }
  return script->second[static_cast<size_t>(output_number)];
}

std::shared_ptr<const Outcome> Sched::settle() {
  const auto plan = in_flight_.front();
  in_flight_.pop_front();
  const auto num_rows = static_cast<size_t>(plan->num_rows());
  const auto width = static_cast<size_t>(config_.verify_width);
  std::vector<int32_t> tokens(num_rows * width, 0);
  std::vector<int32_t> counts(num_rows, 0);
  for (size_t row = 0; row < num_rows; ++row) {
    if (plan->samples[row] == 0) continue;
    const int64_t id = plan->request_ids[row];
    const bool decodes = static_cast<int32_t>(row) < plan->num_decode_rows;
    counts[row] = decodes ? std::min(accepted_, plan->query_lens[row]) : 1;
    // A decode row's first query token is the last known one; a prefill row's last is.
    int32_t last_known = plan->context_lens[row] + (decodes ? 1 : plan->query_lens[row]);
    // Behind drafts that were in flight, only the executor knew where it began: by now it is told.
    if (plan->context_slack[row] > 0)
      last_known = prompt_lens_[id] + static_cast<int32_t>(outputs_[id].size());
    for (int32_t i = 0; i < counts[row]; ++i) {
      tokens[row * width + static_cast<size_t>(i)] =
          TokenFor(id, last_known + i - prompt_lens_[id]);
    }
  }
  auto result = get().Settle(StepId(plan->step_id), {config_.verify_width, tokens, counts});
  const auto outcome = result.value();
  for (size_t i = 0; i < outcome->request_ids.size(); ++i) {
    const int64_t id = outcome->request_ids[i];
    const auto start = tokens.begin() + int64_t{outcome->rows[i]} * config_.verify_width;
    outputs_[id].insert(outputs_[id].end(), start, start + outcome->num_tokens[i]);
    if (outcome->finish[i] != 0) ends_[id].push_back(static_cast<Finish>(outcome->finish[i]));
  }
  get().CheckInvariants();
  return outcome;
}

std::shared_ptr<const Plan> Sched::step() {
  auto planned = plan();
  const size_t keep = planned ? static_cast<size_t>(config_.overlap_depth) : 0;
  while (in_flight_.size() > keep) {
    settle();
    if (!planned) break;
  }
  return planned;
}

Sched& Sched::run() {
  for (int idle = 0; get().HasWork();) {
    const size_t before = in_flight_.size();
    const bool moved = step() != nullptr || in_flight_.size() < before;
    idle = moved ? 0 : idle + 1;
    if (idle > 2) throw std::logic_error("work exists and nothing moves");
  }
  return *this;
}

bool Sched::abort(int64_t id) {
  const auto ended = get().Abort(RequestId(id));
  if (ended) ends_[id].push_back(ended->finish);
  get().CheckInvariants();
  return ended.has_value();
}

int32_t Sched::cached(int64_t id) {
  const auto counters = get().CountersOf(RequestId(id));
  return counters ? counters->cached_tokens : -1;
}

Finish Sched::finish(int64_t id) const {
  const auto end = ends_.find(id);
  return end == ends_.end() ? Finish::kNone : end->second.front();
}

int Sched::num_ends(int64_t id) const {
  const auto end = ends_.find(id);
  return end == ends_.end() ? 0 : static_cast<int>(end->second.size());
}

int RowOf(const Plan& plan, int64_t id) {
  const auto found = std::find(plan.request_ids.begin(), plan.request_ids.end(), id);
  return found == plan.request_ids.end() ? -1 : static_cast<int>(found - plan.request_ids.begin());
}

}  // namespace tokenspeed::testing
