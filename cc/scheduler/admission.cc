// SPDX-License-Identifier: MIT

#include <algorithm>
#include <iterator>
#include <ranges>
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
    if (std::holds_alternative<Prefetching>(request->state)) continue;
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
  const bool receives =
      config_.role == Role::kDecode && std::holds_alternative<Submitted>(request.state);
  const Start start = receives ? Start{{request.hit, {}}, request.log.size()}
                               : FindStart(request, identity, /*copies=*/true);
  if (AdmitAt(draft, request, identity, start)) return true;
  // The block that a tail would be copied out of may be the one that the pool lacks. With nobody
  // here, no other will come back.
  const bool waits = !prefilling_.empty() || !decoding_.empty() || BlocksWillReturn();
  if (!start.hit.tail.node.valid() || waits) return false;
  return AdmitAt(draft, request, identity, FindStart(request, identity, /*copies=*/false));
}

bool Scheduler::AdmitAt(Draft& draft, Request& request, const Identity& identity,
                        const Start& start) {
  const int32_t num_tokens = request.log.size();
  const bool receives =
      config_.role == Role::kDecode && std::holds_alternative<Submitted>(request.state);
  const int32_t num_here = start.hit.path.num_blocks * config_.block_size;
  const int32_t num_cached = receives ? num_here : start.num_tokens;

  const bool whole =
      !config_.chunked_prefill && num_tokens <= config_.max_batched_tokens && !receives;
  if (whole && num_tokens - num_cached > draft.prefill_budget) {
    prefill_turn_ = draft.num_tokens > 0;
    return false;
  }
  // One block for each running request, so that a newcomer does not drive others out at once.
  const auto num_spare = static_cast<int32_t>(decoding_.size());
  auto home = cache_.MoveIn(start, identity, num_tokens, num_spare);
  if (!home) return false;
  const std::vector<BlockPlace> incoming = cache_.Incoming(*home, start);
  request.scheduled = num_cached;
  request.settled = incoming.empty() ? num_cached : num_here;
  const int32_t chunk = ChunkOf(draft, request);
  const bool runs_now = incoming.empty() || (!receives && config_.load_lead_layers == 0);
  if (runs_now && cache_.num_groups() > 1 && !cache_.Grow(*home, num_cached + chunk)) return false;

  MoveInto(request, receives ? Start{start.hit, num_here} : start);
  if (receives) {
    Advance<Submitted>(request, event::Receive{std::move(*home)});
    StartReceive(request, incoming);
  } else if (!incoming.empty()) {
    AdvanceAny<Submitted, Retracted>(request, event::Restore{std::move(*home)});
    StartLoad(request, incoming);
    if (runs_now) RunBehindLoad(request);
  } else {
    AdvanceAny<Submitted, Retracted>(request, event::Admit{std::move(*home)});
    prefilling_.push_back(&request);
  }
  ClaimNextBlock(request);
  if (runs_now) PlanChunk(draft, request, chunk);
  return true;
}

void Scheduler::MoveInto(Request& request, const Start& start) {
  waiting_.Remove(request);
  request.is_new_in_slot = true;
  request.state_tokens = -1;
  request.next_state_column = 0;
  RequestCounters& counters = request.counters;
  if (std::holds_alternative<Retracted>(request.state)) {
    counters.num_retracted_steps += next_step_ - request.retracted_step;
  }
  if (counters.admitted_step >= 0) return;
  counters.admitted_step = next_step_;
  counters.cached_tokens = start.num_tokens;
  counters.host_tokens = counters.store_tokens = 0;  // a load that failed was counted before
  const int32_t num_blocks = start.num_tokens / config_.block_size;
  const int32_t num_here = start.hit.path.num_blocks;
  if (start.hit.tail.node.valid() || num_blocks <= num_here) return;
  const int32_t num_fetched =
      std::min(num_blocks, request.end_fetched) - std::max(num_here, request.first_fetched);
  counters.store_tokens = std::max(num_fetched, 0) * config_.block_size;
  counters.host_tokens = (num_blocks - num_here) * config_.block_size - counters.store_tokens;
}

// The furthest point from which every group can go on: in the middle of a block, by copy (if
// `copies`); or where blocks end, on the device or with what the host tier adds.
Start Scheduler::FindStart(Request& request, const Identity& identity, bool copies) {
  const Content content = ContentOf(request);
  const PrefixCursor& path = request.hit;
  const int32_t limit = request.log.size() - 1;
  const auto nowhere = [](int32_t, int32_t) { return false; };
  const int32_t joint = cache_.Joint(path, path.num_blocks, nowhere);
  Start best{{cache_.Prefix(path, joint), {}}, joint * config_.block_size};
  for (const int32_t depth : {joint, path.num_blocks}) {
    if (!copies) break;
    const PrefixCursor end = cache_.Prefix(path, depth);
    const TailHit tail = cache_.FindTail(end, identity, content, limit);
    const int32_t reach = depth * config_.block_size + tail.num_tokens;
    if (tail.node.valid() && reach > best.num_tokens) best = {{end, tail}, reach};
  }
  if (!host_.enabled()) return best;
  const int32_t depth = HostDepth(request, identity, content);
  if (depth * config_.block_size <= best.num_tokens) return best;
  return {{cache_.Prefix(path, depth), {}}, depth * config_.block_size};
}

int32_t Scheduler::HostDepth(const Request& request, const Identity& identity,
                             const Content& content) const {
  const auto on_host = [&](int32_t group, int32_t column) {
    return host_.Find(AskFor(identity, content, {group, column, {}})).valid();
  };
  const int32_t limit = (request.log.size() - 1) / config_.block_size;
  int32_t reach = request.hit.num_blocks;
  while (reach < limit && on_host(0, reach)) ++reach;
  return cache_.Joint(request.hit, reach, on_host);
}

HostQuery Scheduler::AskFor(const Identity& identity, const Content& content,
                            const BlockPlace& place) const {
  const auto i = static_cast<size_t>(place.column);
  const auto block_size = static_cast<size_t>(config_.block_size);
  return {identity, content.hashes[i], i == 0 ? identity.RootHash() : content.hashes[i - 1],
          content.tokens.subspan(i * block_size, block_size), place.group};
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
  request.retracted_step = next_step_;
  Residence residence =
      LeaveFrom<Prefilling, AwaitingFirstToken, Decoding>(request, event::Retract{});
  Depart(request, std::move(residence));
  request.hit = {};
  waiting_.Add(request);
  // Room in the host tier first, then the blocks go: what is being copied cannot be evicted.
  if (host_.enabled()) StartStores();
}

Request* Scheduler::YoungestResident() const {
  // What a load writes to cannot be taken away.
  const auto can_go = [](const Request* request) { return request->transfer < 0; };
  const auto last = std::ranges::find_if(std::views::reverse(decoding_), can_go);
  Request* youngest = last == decoding_.rend() ? nullptr : *last;
  for (Request* request : prefilling_) {
    if (!can_go(request)) continue;
    if (youngest == nullptr || youngest->key < request->key) youngest = request;
  }
  return youngest;
}

bool Scheduler::BlocksWillReturn() const {
  return std::ranges::any_of(tickets_, &Ticket::ReturnsBlocks) ||
         std::ranges::any_of(transfers_, [](const auto& t) { return t.second.ReturnsBlocks(); });
}

}  // namespace tokenspeed
