// SPDX-License-Identifier: MIT

#include <algorithm>
#include <utility>

#include "cc/base/containers.h"
#include "cc/scheduler/draft.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// Among how many requests that could run the one with the longest cached prefix goes first; also
// how often the front of the queue may be passed by before it goes whatever the others have.
constexpr int kPrefixWindow = 16;
// How far the window looks past requests that wait for a prefix being computed.
constexpr int kMaxScan = 64;

}  // namespace

void Scheduler::AdmitWaiting(Draft& draft) {
  const auto has_seat = [&] {
    return static_cast<int32_t>(prefilling_.size() + decoding_.size()) < config_.max_num_seqs &&
           cache_.slots().num_free() > 0;
  };
  while (draft.prefill_budget > 0 && !waiting_.empty() && has_seat()) {
    Request* request = PickCandidate();
    if (request == nullptr || !Admit(draft, *request)) return;
  }
}

Request* Scheduler::PickCandidate() {
  Request* front = nullptr;
  Request* best = nullptr;
  int num_runnable = 0;
  int num_seen = 0;
  for (const auto& [key, request] : waiting_) {
    if (++num_seen > kMaxScan || num_runnable == kPrefixWindow) break;
    if (front != nullptr && request->priority != front->priority) break;
    // A retracted request resumes from its last token, which is still on its way.
    if (request->rows_in_flight > 0 || IsBlockedByClaim(*request)) continue;
    ++num_runnable;
    if (front == nullptr) front = best = request;
    if (front->passed_by >= kPrefixWindow) break;
    if (request->hit.num_blocks > best->hit.num_blocks) best = request;
  }
  if (best != front) ++front->passed_by;
  return best;
}

bool Scheduler::IsBlockedByClaim(Request& request) {
  if (!config_.enable_prefix_caching) return false;
  const Identity identity = IdentityOf(request);
  request.root = identity.RootHash();
  const Content content = ContentOf(request);
  // The last known token is always computed: its logits are what comes next.
  const int32_t limit = request.log.size() - 1;
  request.hit = cache_.Extend(request.hit, identity, content, limit);
  const int32_t next = request.hit.num_blocks;
  return (next + 1) * config_.block_size <= limit &&
         claims_.IsClaimed(content.hashes[static_cast<size_t>(next)]);
}

bool Scheduler::Admit(Draft& draft, Request& request) {
  const Identity identity = IdentityOf(request);
  const Content content = ContentOf(request);
  const int32_t num_tokens = request.log.size();
  const PrefixHit hit{request.hit, cache_.FindTail(request.hit, identity, content, num_tokens - 1)};

  const bool whole = !config_.chunked_prefill && num_tokens <= config_.max_batched_tokens;
  const int32_t cached = hit.path.num_blocks * config_.block_size + hit.tail.num_tokens;
  if (whole && num_tokens - cached > draft.prefill_budget) {
    prefill_turn_ = draft.num_tokens > 0;
    return false;
  }
  // One block for each running request, so that a newcomer does not drive others out at once.
  const auto num_spare = static_cast<int32_t>(decoding_.size());
  auto moved_in = cache_.MoveIn(hit, identity, num_tokens, num_spare);
  if (!moved_in) return false;

  waiting_.Remove(request);
  request.scheduled = moved_in->num_cached_tokens;
  request.settled = hit.path.num_blocks * config_.block_size;
  if (request.counters.admitted_step < 0) {
    request.counters.admitted_step = next_step_;
    request.counters.cached_tokens = moved_in->num_cached_tokens;
  }
  Plan& plan = *draft.plan;
  plan.new_slots.push_back(moved_in->residence.slot().value());
  plan.new_slot_request_ids.push_back(request.id.value());
  if (moved_in->copy_to.valid()) {
    plan.block_copies.push_back({moved_in->copy_from.value(), moved_in->copy_to.value()});
    draft.copy_sources.push_back(std::move(moved_in->copy_source));
  }
  AdvanceAny<Submitted, Retracted>(request, event::Admit{std::move(moved_in->residence)});
  prefilling_.push_back(&request);
  ClaimNextBlock(request);
  PlanChunk(draft, request);
  return true;
}

void Scheduler::ClaimNextBlock(Request& request) {
  if (!config_.enable_prefix_caching) return;
  const Residence& home = *HomeOf(request.state);
  const Content content = ContentOf(request);
  const auto next = static_cast<size_t>(home.num_published());
  claims_.Move(request,
               home.publishes() && next < content.hashes.size() ? content.hashes[next] : 0);
}

void Scheduler::Retract(Request& request) {
  request.counters.num_retractions += 1;
  Residence residence =
      LeaveFrom<Prefilling, AwaitingFirstToken, Decoding>(request, event::Retract{});
  Depart(request, std::move(residence));
  request.hit = {};
  waiting_.Add(request);
}

Request* Scheduler::YoungestResident() const {
  Request* youngest = decoding_.back();
  for (Request* request : prefilling_) {
    if (youngest->key < request->key) youngest = request;
  }
  return youngest;
}

bool Scheduler::BlocksWillReturn() const {
  return std::ranges::any_of(tickets_, &Ticket::ReturnsBlocks);
}

}  // namespace tokenspeed
