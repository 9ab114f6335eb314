// SPDX-License-Identifier: MIT

#include <algorithm>
#include <iterator>
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

bool Scheduler::HasSeat() const {
  const size_t num_resident = prefilling_.size() + decoding_.size() + transferring_.size();
  return static_cast<int32_t>(num_resident) < config_.max_num_seqs && cache_.slots().num_free() > 0;
}

void Scheduler::AdmitWaiting(Draft& draft) {
  while (draft.prefill_budget > 0 && !waiting_.empty() && HasSeat()) {
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
    // While paused only those are let in that ran before, wherever they stand.
    if (paused_ && !std::holds_alternative<Retracted>(request->state)) continue;
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
  const bool receives =
      config_.role == Role::kDecode && std::holds_alternative<Submitted>(request.state);
  const std::vector<BlockId> host_run =
      receives ? std::vector<BlockId>() : FindHostRun(request, identity, content);
  PrefixHit hit{cache_.Joint(request.hit), {}};
  if (!receives && host_run.empty()) {
    hit.tail = cache_.FindTail(hit.path, identity, content, num_tokens - 1);
  }
  const int32_t num_path = hit.path.num_blocks * config_.block_size;
  const int32_t num_loaded = static_cast<int32_t>(host_run.size()) * config_.block_size;
  const int32_t num_cached = num_path + hit.tail.num_tokens + num_loaded;

  const bool whole =
      !config_.chunked_prefill && num_tokens <= config_.max_batched_tokens && !receives;
  if (whole && num_tokens - num_cached > draft.prefill_budget) {
    prefill_turn_ = draft.num_tokens > 0;
    return false;
  }
  // One block for each running request, so that a newcomer does not drive others out at once.
  const auto num_spare = static_cast<int32_t>(decoding_.size());
  auto moved_in = cache_.MoveIn(hit, identity, num_tokens, num_spare);
  if (!moved_in) return false;
  request.scheduled = num_cached;
  const int32_t chunk = ChunkOf(draft, request);
  if (cache_.num_groups() > 1 && !cache_.Grow(moved_in->residence, num_cached + chunk))
    return false;

  waiting_.Remove(request);
  request.is_new_in_slot = true;
  request.settled = num_path;
  if (request.counters.admitted_step < 0) {
    request.counters.admitted_step = next_step_;
    request.counters.cached_tokens = num_cached;
  }
  TakeCopies(draft, *moved_in);
  if (receives) {
    Advance<Submitted>(request, event::Receive{std::move(moved_in->residence)});
    StartReceive(request);
  } else if (!host_run.empty()) {
    AdvanceAny<Submitted, Retracted>(request, event::Restore{std::move(moved_in->residence)});
    StartLoad(request, host_run);
  } else {
    AdvanceAny<Submitted, Retracted>(request, event::Admit{std::move(moved_in->residence)});
    prefilling_.push_back(&request);
  }
  ClaimNextBlock(request);
  if (std::holds_alternative<Prefilling>(request.state)) PlanChunk(draft, request, chunk);
  return true;
}

void Scheduler::TakeCopies(Draft& draft, MovedIn& moved_in) {
  Plan& plan = *draft.plan;
  for (const GroupCopy& copy : moved_in.copies) {
    auto& copies = copy.group == 0 ? plan.block_copies
                                   : plan.groups[static_cast<size_t>(copy.group) - 1].copies;
    copies.push_back({copy.from.value(), copy.to.value()});
    if (copy.group == 0) draft.copy_sources.push_back(std::move(moved_in.copy_source));
  }
  std::ranges::move(moved_in.side_sources, std::back_inserter(draft.side_sources));
}

std::vector<BlockId> Scheduler::FindHostRun(const Request& request, const Identity& identity,
                                            const Content& content) const {
  std::vector<BlockId> run;
  if (!host_.enabled()) return run;
  const auto block_size = static_cast<size_t>(config_.block_size);
  const auto limit = static_cast<size_t>(request.log.size() - 1) / block_size;
  for (auto i = static_cast<size_t>(request.hit.num_blocks); i < limit; ++i) {
    const uint64_t parent = i == 0 ? identity.RootHash() : content.hashes[i - 1];
    const BlockId block = host_.Find(identity, content.hashes[i], parent,
                                     content.tokens.subspan(i * block_size, block_size));
    if (!block.valid()) break;
    run.push_back(block);
  }
  return run;
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
  Request* youngest = decoding_.empty() ? nullptr : decoding_.back();
  for (Request* request : prefilling_) {
    if (youngest == nullptr || youngest->key < request->key) youngest = request;
  }
  return youngest;
}

bool Scheduler::BlocksWillReturn() const {
  return std::ranges::any_of(tickets_, &Ticket::ReturnsBlocks) ||
         std::ranges::any_of(transfers_, [](const auto& t) { return t.second.ReturnsBlocks(); });
}

}  // namespace tokenspeed
