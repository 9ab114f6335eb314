// SPDX-License-Identifier: MIT

#include <algorithm>
#include <iterator>
#include <utility>

#include "cc/base/containers.h"
#include "cc/scheduler/draft.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {

std::shared_ptr<const Plan> Scheduler::MakePlan() {
  if (static_cast<int32_t>(tickets_.size()) > config_.overlap_depth) return nullptr;
  if (paused_ == PauseMode::kKeep) return nullptr;
  StartPrefetches();
  Draft draft;
  draft.plan->groups.resize(static_cast<size_t>(cache_.num_groups()) - 1);
  if (std::exchange(prefill_turn_, false)) {
    draft.prefill_budget = config_.max_batched_tokens;
    AdmitWaiting(draft);
    prefill_turn_ = false;
  }
  if (draft.rows.empty()) {
    PlanDecodes(draft);
    SetPrefillBudget(draft);
    PlanPrefills(draft);
    AdmitWaiting(draft);
  } else {
    for (Request* request : decoding_) NoteDelay(*request);
  }
  if (host_.enabled()) StartStores();
  if (config_.store.enabled) StartPuts();
  if (draft.rows.empty()) return nullptr;
  return Launch(std::move(draft));
}

void Scheduler::PlanDecodes(Draft& draft) {
  draft.rows.reserve(decoding_.size() + 8);
  // By index: a retraction takes requests off the end of the list, never the ones already planned.
  for (size_t i = 0; i < decoding_.size(); ++i) {
    Request& request = *decoding_[i];
    if (WillDecode(request)) {
      draft.has_running = true;
      draft.prompts_since_decode =
          std::max(draft.prompts_since_decode, prompt_work_ - request.prompts_seen);
    }
    if (!IsReadyToDecode(request)) continue;
    const int32_t query_len = DecodeLength(request);
    if (EnsureRoom(request, request.scheduled + query_len)) {
      AddRow(draft, request, {.query_len = query_len, .samples = true, .decodes = true});
    } else if (HomeOf(request.state) != nullptr) {
      NoteDelay(request);
    }
  }
}

bool Scheduler::WillDecode(const Request& request) const {
  return config_.role != Role::kPrefill && request.num_output_ahead() < request.stop.max_new_tokens;
}

bool Scheduler::IsReadyToDecode(const Request& request) const {
  if (!WillDecode(request)) return false;
  if (config_.verify_width > 1 && request.rows_in_flight > 0) {
    // How many drafts a row keeps is known on the device before it is known here. An engine that
    // takes the position from there can have the next row in flight; where a state has to be saved
    // the position must be known here.
    const int32_t query_len = DecodeLength(request);
    if (!config_.verify_overlap || query_len < 1 || MayCrossCheckpoint(request, query_len))
      return false;
  }
  return request.scheduled - request.slack + 1 == request.num_tokens_ahead();
}

int32_t Scheduler::DecodeLength(const Request& request) const {
  const int32_t left = request.stop.max_new_tokens - request.num_output_ahead();
  // The last token is never read back. With drafts in flight the row may start further on than it
  // will, so its end is bounded by what the request has room for.
  const int32_t end = request.log.num_prompt() + request.stop.max_new_tokens - 1;
  return std::min({config_.verify_width, left, end - request.scheduled});
}

bool Scheduler::MayCrossCheckpoint(const Request& request, int32_t query_len) const {
  if (request.slack == 0 || !config_.enable_prefix_caching) return false;
  const int32_t first = request.scheduled - request.slack;
  const int32_t last = request.scheduled + query_len;
  for (int32_t g = 1; g < cache_.num_groups(); ++g) {
    const CacheGroup& group = cache_.group(g);
    if (group.kind != GroupKind::kState) continue;
    if (first / group.checkpoint_tokens != last / group.checkpoint_tokens) return true;
  }
  return false;
}

bool Scheduler::EnsureRoom(Request& request, int32_t num_tokens) {
  while (!cache_.Grow(*HomeOf(request.state), num_tokens)) {
    // Blocks on their way back are enough reason to wait: nobody loses work for the sake of one
    // step.
    if (BlocksWillReturn()) return false;
    Request* victim = YoungestResident();
    if (victim == nullptr) return false;  // all that are left wait for a load
    Retract(*victim);
    if (victim == &request) return false;
  }
  return true;
}

void Scheduler::SetPrefillBudget(Draft& draft) const {
  draft.prefill_budget = config_.max_batched_tokens - draft.num_tokens;
  if (!draft.has_running) return;
  // Only what settles can let them decode again; with nothing in flight prompts need not wait.
  if (draft.rows.empty() && tickets_.empty() && !BlocksWillReturn()) return;
  draft.prefill_work = config_.max_decode_gap_tokens - draft.prompts_since_decode;
  draft.prefill_budget =
      static_cast<int32_t>(std::clamp<int64_t>(draft.prefill_work, 0, draft.prefill_budget));
}

int64_t Scheduler::WorkOf(int64_t start, int64_t num_tokens) const {
  if (config_.context_cost_tokens == 0) return num_tokens;
  // Token i attends to start + i others: the sum of 1 + (start + i) / context_cost_tokens.
  return num_tokens +
         num_tokens * (2 * start + num_tokens) / (2 * int64_t{config_.context_cost_tokens});
}

int32_t Scheduler::TokensWithin(int64_t work, int64_t start, int32_t most) const {
  if (WorkOf(start, most) <= work) return most;
  int32_t fits = 0;
  for (int32_t above = most; above - fits > 1;) {
    const int32_t middle = fits + (above - fits) / 2;
    (WorkOf(start, middle) <= work ? fits : above) = middle;
  }
  return std::max(fits, 1);  // or a long prompt would never end
}

void Scheduler::PlanPrefills(Draft& draft) {
  for (size_t i = 0; i < prefilling_.size() && draft.prefill_budget > 0;) {
    Request& request = *prefilling_[i];
    const int32_t chunk = ChunkOf(draft, request);
    if (MakeRoomForPrefill(draft, request, request.scheduled + chunk)) {
      PlanChunk(draft, request, chunk);
    }
    // It leaves the list with its last chunk, or when it was the one to be retracted.
    if (i < prefilling_.size() && prefilling_[i] == &request) ++i;
  }
}

bool Scheduler::MakeRoomForPrefill(const Draft& draft, Request& request, int32_t num_tokens) {
  // The prompt's blocks of group 0 are there since admission; a window's come chunk by chunk.
  while (!cache_.Grow(*HomeOf(request.state), num_tokens)) {
    // Somebody else moves or gives blocks back: then this one can wait.
    if (!draft.rows.empty() || !tickets_.empty() || BlocksWillReturn()) return false;
    Request* victim = YoungestResident();
    if (victim == nullptr) return false;
    Retract(*victim);
    if (victim == &request) return false;
  }
  return true;
}

int32_t Scheduler::ChunkOf(const Draft& draft, const Request& request) const {
  int32_t chunk = std::min(request.log.size() - request.scheduled, draft.prefill_budget);
  for (int32_t g = 1; g < cache_.num_groups(); ++g) {
    const CacheGroup& group = cache_.group(g);
    if (group.kind != GroupKind::kState || !config_.chunked_prefill) continue;
    // A state can only be saved where a step ends.
    chunk = std::min(chunk, group.checkpoint_tokens - request.scheduled % group.checkpoint_tokens);
  }
  if (config_.chunked_prefill) {
    chunk = TokensWithin(draft.prefill_work, request.scheduled, chunk);
  }
  return chunk;
}

void Scheduler::PlanChunk(Draft& draft, Request& request, int32_t chunk) {
  const auto tokens = request.log.tokens(request.scheduled, chunk);
  auto& prompt = draft.plan->prompt_token_ids;
  prompt.insert(prompt.end(), tokens.begin(), tokens.end());
  const int64_t work = WorkOf(request.scheduled, chunk);
  prompt_work_ += work;
  draft.prefill_work -= work;
  draft.prefill_budget = draft.prefill_work > 0 ? draft.prefill_budget - chunk : 0;
  const bool last = request.scheduled + chunk == request.log.size();
  AddRow(draft, request, {.query_len = chunk, .samples = last, .decodes = false});
  if (!last) return;
  Advance<Prefilling>(request, event::PromptScheduled{});
  if (request.counters.prefill_done_step < 0) request.counters.prefill_done_step = next_step_;
  EraseFirst(prefilling_, &request);
  InsertDecoding(request);
}

void Scheduler::NoteStates(Draft& draft, Request& request, const RowShape& shape) {
  for (int32_t g = 1; g < cache_.num_groups(); ++g) {
    if (cache_.group(g).kind != GroupKind::kState) continue;
    draft.plan->groups[static_cast<size_t>(g) - 1].state_columns.push_back(
        request.next_state_column);
  }
  SaveStates(draft, request, shape);
  // A decode row leaves a state behind each of its tokens, a chunk of a prompt only its last one.
  request.next_state_column = shape.decodes && shape.query_len > 1 ? -1 : 0;
}

void Scheduler::SaveStates(Draft& draft, Request& request, const RowShape& shape) {
  const int32_t end = request.scheduled;
  const int32_t start = shape.decodes ? end - shape.query_len : end - 1;
  for (int32_t g = 1; g < cache_.num_groups(); ++g) {
    const CacheGroup& group = cache_.group(g);
    if (group.kind != GroupKind::kState) continue;
    const int32_t step = group.checkpoint_tokens;
    for (int32_t at = (start / step + 1) * step; at <= end; at += step) {
      // Kept if the row keeps the tokens up to there.
      const StateMark mark{.num_tokens = at, .column = at - start - 1};
      const auto save = cache_.SaveState(*HomeOf(request.state), g, mark);
      if (!save) continue;
      draft.plan->groups[static_cast<size_t>(g) - 1].saves.push_back(
          {save->from.value(), save->to.value()});
    }
  }
}

void Scheduler::InsertDecoding(Request& request) {
  const auto by_key = [](const Request* a, const Request* b) { return a->key < b->key; };
  request.prompts_seen = prompt_work_;
  decoding_.insert(std::upper_bound(decoding_.begin(), decoding_.end(), &request, by_key),
                   &request);
}

void Scheduler::AddRow(Draft& draft, Request& request, RowShape shape) {
  Plan& plan = *draft.plan;
  plan.request_ids.push_back(request.id.value());
  plan.slots.push_back(HomeOf(request.state)->slot().value());
  plan.query_lens.push_back(shape.query_len);
  plan.context_lens.push_back(request.scheduled);
  plan.context_slack.push_back(request.slack);
  plan.samples.push_back(shape.samples ? 1 : 0);
  if (std::exchange(request.is_new_in_slot, false)) {
    plan.new_slots.push_back(plan.slots.back());
    plan.new_slot_request_ids.push_back(request.id.value());
    TakeCopies(draft, request);
  }
  if (request.transfer >= 0) NoteWait(draft, request);
  draft.rows.push_back({&request, shape.query_len, shape.samples, shape.decodes});
  plan.num_decode_rows += shape.decodes ? 1 : 0;
  draft.num_tokens += shape.query_len;

  request.scheduled += shape.query_len;
  request.rows_in_flight += 1;
  request.samples_in_flight += shape.samples ? 1 : 0;
  request.counters.num_sampling_rows += shape.samples ? 1 : 0;
  request.last_step = StepId(next_step_);
  if (cache_.num_groups() > 1) NoteStates(draft, request, shape);
  request.slack += shape.decodes ? shape.query_len - 1 : 0;
  request.is_delayed = false;
}

void Scheduler::TakeCopies(Draft& draft, Request& request) {
  Plan& plan = *draft.plan;
  StartCopies start = cache_.TakeStartCopies(*HomeOf(request.state));
  for (const GroupCopy& copy : start.copies) {
    auto& copies = copy.group == 0 ? plan.block_copies
                                   : plan.groups[static_cast<size_t>(copy.group) - 1].copies;
    copies.push_back({copy.from.value(), copy.to.value()});
    if (copy.group == 0) draft.copy_sources.push_back(std::move(start.tail));
  }
  std::ranges::move(start.sides, std::back_inserter(draft.side_sources));
}

void Scheduler::NoteWait(Draft& draft, const Request& request) {
  const TransferTicket& load = *transfers_.Find(request.transfer);
  draft.plan->load_waits.push_back({request.transfer, load.layers_done});
}

std::shared_ptr<const Plan> Scheduler::Launch(Draft draft) {
  Plan& plan = *draft.plan;
  plan.step_id = next_step_++;
  for (const Row& row : draft.rows) {
    // All of a step's tokens come at its end, a prompt's first one too.
    if (row.samples) row.request->prompts_seen = prompt_work_;
  }
  plan.table_updates = cache_.tables().TakeUpdates();
  for (int32_t g = 1; g < cache_.num_groups(); ++g) {
    plan.groups[static_cast<size_t>(g) - 1].table_updates = cache_.tables(g).TakeUpdates();
  }
  tickets_.push_back({draft.plan,
                      std::move(draft.rows),
                      {},
                      std::move(draft.copy_sources),
                      std::move(draft.side_sources)});
  return draft.plan;
}

void Scheduler::NoteDelay(Request& request) {
  request.counters.num_delayed_steps += 1;
  if (!std::exchange(request.is_delayed, true)) request.counters.num_delayed += 1;
}

}  // namespace tokenspeed
