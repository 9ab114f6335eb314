// SPDX-License-Identifier: MIT

#include <algorithm>
#include <string>
#include <utility>

#include "cc/base/containers.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// How many decode rows may publish a block in one settled step: twice what fills up on average, so
// that requests which started together do not all publish together, and none waits for long.
int32_t PublishTurns(const SchedulerConfig& config) {
  const int32_t kept = config.max_num_seqs * config.verify_width;
  return 2 * CeilDiv(kept, config.block_size) + 16;
}

}  // namespace

Status Scheduler::ValidateResult(StepId step, const StepResult& result) const {
  if (tickets_.empty()) return Status::Invalid("no step is in flight");
  const Ticket& ticket = tickets_.front();
  if (ticket.plan->step_id != step.value()) {
    return Status::Invalid("steps settle oldest first: step " +
                           std::to_string(ticket.plan->step_id) + " is next, got step " +
                           std::to_string(step.value()));
  }
  for (const LoadWait& wait : ticket.plan->load_waits) {
    if (!transfers_.Contains(wait.transfer_id)) continue;
    return Status::Invalid("step " + std::to_string(step.value()) + " runs behind transfer " +
                           std::to_string(wait.transfer_id) + ", which has to settle first");
  }
  const size_t num_rows = ticket.rows.size();
  if (result.num_tokens.size() != num_rows || result.width < 1 ||
      result.token_ids.size() != num_rows * static_cast<size_t>(result.width)) {
    return Status::Invalid("step " + std::to_string(step.value()) + " has " +
                           std::to_string(num_rows) +
                           " rows; token_ids must be [rows, width] and num_tokens [rows]");
  }
  for (size_t i = 0; i < num_rows; ++i) {
    const Row& row = ticket.rows[i];
    if (!row.samples || row.request->num_void_rows > 0) continue;
    if (std::holds_alternative<Finishing>(row.request->state)) continue;
    const int32_t most = std::min(result.width, row.decodes ? row.query_len : 1);
    const int32_t count = result.num_tokens[i];
    if (count < 1 || count > most) {
      return Status::Invalid("num_tokens[" + std::to_string(i) + "] must be between 1 and " +
                             std::to_string(most) + ", got " + std::to_string(count));
    }
    const auto tokens =
        result.token_ids.subspan(i * static_cast<size_t>(result.width), static_cast<size_t>(count));
    if (std::ranges::any_of(tokens, [](int32_t token) { return token < 0; })) {
      return Status::Invalid("token_ids[" + std::to_string(i) + "] holds a negative token id");
    }
  }
  return Status::Ok();
}

Result<std::shared_ptr<const Outcome>> Scheduler::Settle(StepId step, const StepResult& result) {
  if (Status status = ValidateResult(step, result); !status.ok()) return status;
  Ticket ticket = std::move(tickets_.front());
  tickets_.pop_front();
  auto outcome = std::make_shared<Outcome>();
  publish_turns_ = PublishTurns(config_);
  for (size_t i = 0; i < ticket.rows.size(); ++i) {
    SettleRow(ticket.rows[i], static_cast<int32_t>(i), result, *outcome);
  }
  for (Estate& estate : ticket.estates) MoveOut(*estate.request, std::move(estate.residence));
  // Who left holds its blocks no more, so the next plan may evict them.
  const bool left = std::ranges::any_of(outcome->finish, [](uint8_t f) { return f != 0; });
  if (host_.enabled() && (left || !ticket.estates.empty())) StartStores();
  for (const Row& row : ticket.rows) {
    if (std::holds_alternative<Finishing>(row.request->state)) DrainIfDone(*row.request);
  }
  return std::shared_ptr<const Outcome>(std::move(outcome));
}

void Scheduler::SettleRow(const Row& row, int32_t row_number, const StepResult& result,
                          Outcome& outcome) {
  Request& request = *row.request;
  request.rows_in_flight -= 1;
  request.samples_in_flight -= row.samples ? 1 : 0;
  request.slack -= row.decodes ? row.query_len - 1 : 0;
  if (request.num_void_rows > 0) {
    request.num_void_rows -= 1;
    return;
  }
  if (std::holds_alternative<Finishing>(request.state)) return SettleEnded(request, row);
  if (!row.samples) {
    KeepTokens(request, row, row.query_len);
    return PublishSettled(request);
  }

  const auto i = static_cast<size_t>(row_number);
  const auto tokens = result.token_ids.subspan(i * static_cast<size_t>(result.width),
                                               static_cast<size_t>(result.num_tokens[i]));
  Finish finish = Finish::kNone;
  const int32_t num_kept = AcceptTokens(request, tokens, finish);
  KeepTokens(request, row, row.decodes ? num_kept : row.query_len);
  if (config_.role == Role::kPrefill)
    finish = Finish::kNone;  // where it ends is the decode engine's to say
  Report(request, row_number, num_kept, finish, outcome);
  if (finish == Finish::kNone) {
    row.decodes ? PublishInTurn(request) : PublishSettled(request);
    if (config_.role == Role::kPrefill) return StartSend(request);
    AdvanceAny<AwaitingFirstToken, Decoding, Retracted>(request, event::TokenSettled{});
  } else {
    Complete(request, finish);
  }
}

void Scheduler::KeepTokens(Request& request, const Row& row, int32_t num_kept) {
  const int32_t num_dropped = row.query_len - num_kept;
  request.settled += num_kept;
  // Drafted positions that were not kept are written again by the next row.
  request.scheduled -= num_dropped;
  request.state_tokens = request.settled;
  request.state_column = row.decodes ? num_kept - 1 : 0;
  if (request.rows_in_flight == 0) request.next_state_column = request.state_column;
  Residence* home = HomeOf(request.state);
  if (num_dropped > 0 && home != nullptr) cache_.DropStatesBehind(*home, request.settled);
}

void Scheduler::SettleEnded(Request& request, const Row& row) {
  // Its end was told; its tokens go nowhere. What a row wrote up to the last known token is sound:
  // that token was its first one, or a draft that a row before it kept.
  request.settled = std::min(request.settled + row.query_len, request.log.size());
  if (!row.decodes) {
    request.state_tokens = request.settled;
  } else if (config_.verify_width > 1 || request.state_tokens < 0 ||
             ++request.state_tokens > request.log.size()) {
    request.state_tokens = -1;  // the state went on, over tokens that nobody will know
  }
  request.state_column = 0;
}

void Scheduler::Report(const Request& request, int32_t row, int32_t num_tokens, Finish finish,
                       Outcome& outcome) {
  outcome.request_ids.push_back(request.id.value());
  outcome.rows.push_back(row);
  outcome.num_tokens.push_back(num_tokens);
  outcome.finish.push_back(static_cast<uint8_t>(finish));
  outcome.prompt_tokens.push_back(request.counters.prompt_tokens);
  outcome.completion_tokens.push_back(request.counters.completion_tokens);
  outcome.cached_tokens.push_back(request.counters.cached_tokens);
  outcome.matched_tokens.push_back(finish == Finish::kStop ? request.log.tokens().back() : -1);
}

int32_t Scheduler::AcceptTokens(Request& request, std::span<const int32_t> tokens, Finish& finish) {
  int32_t num_kept = 0;
  for (const int32_t token : tokens) {
    request.log.Append(token);
    ++num_kept;
    finish = request.stop.Judge(token, request.log.num_output(), config_.eos_token_ids);
    if (finish != Finish::kNone) break;  // what was sampled behind the end is not output
  }
  if (request.counters.first_token_step < 0)
    request.counters.first_token_step = request.last_step.value();
  request.counters.completion_tokens = request.log.num_output();
  return num_kept;
}

void Scheduler::Complete(Request& request, Finish cause) {
  if (std::holds_alternative<Retracted>(request.state)) {
    waiting_.Remove(request);
    Advance<Retracted>(request, event::Complete{cause});
  } else {
    Depart(request, LeaveFrom<AwaitingFirstToken, Decoding>(request, event::Complete{cause}));
  }
  MoveToLeaving(request);
}

void Scheduler::MoveToLeaving(Request& request) {
  recent_.Add(request.id, request.counters);
  const auto found = live_.find(request.id);
  leaving_.push_back(std::move(found->second));
  live_.erase(found);
}

bool Scheduler::HasUnpublished(const Request& request, const Residence& home) const {
  return config_.enable_prefix_caching && home.publishes() &&
         request.settled / config_.block_size > home.num_published();
}

void Scheduler::PublishInTurn(Request& request) {
  const Residence* home = HomeOf(request.state);
  // Published later is published too: its next row asks again, and departure needs no turn.
  if (home == nullptr || (HasUnpublished(request, *home) && publish_turns_-- <= 0)) return;
  PublishSettled(request);
}

void Scheduler::PublishSettled(Request& request) {
  Residence* home = HomeOf(request.state);
  if (home == nullptr) return;
  if (HasUnpublished(request, *home)) {
    cache_.Publish(*home, ContentOf(request), std::min(request.settled, request.log.size()));
    ClaimNextBlock(request);
  }
  if (cache_.num_groups() > 1) cache_.ReleaseBehindWindow(*home, request.settled);
}

void Scheduler::Depart(Request& request, Residence residence) {
  if (!EraseFirst(decoding_, &request) && !EraseFirst(prefilling_, &request)) {
    EraseFirst(transferring_, &request);
  }
  claims_.Move(request, 0);
  if (request.rows_in_flight > 0) {
    // A load that these rows run behind has settled before they do.
    const auto at = static_cast<size_t>(request.last_step.value() - tickets_.front().plan->step_id);
    tickets_[at].estates.push_back({&request, std::move(residence)});
  } else if (request.transfer >= 0) {
    transfers_.Find(request.transfer)->estate = std::move(residence);
  } else {
    MoveOut(request, std::move(residence));
  }
}

void Scheduler::MoveOut(Request& request, Residence residence) {
  cache_.MoveOut(std::move(residence), ContentOf(request),
                 std::min(request.settled, request.log.size()),
                 {.num_tokens = request.state_tokens, .column = request.state_column});
}

void Scheduler::DrainIfDone(Request& request) {
  if (request.rows_in_flight > 0 || request.transfer >= 0) return;
  Advance<Finishing>(request, event::Drained{});
  std::erase_if(leaving_, [&](const auto& owned) { return owned.get() == &request; });
}

}  // namespace tokenspeed
