// SPDX-License-Identifier: MIT

#include <algorithm>
#include <ranges>
#include <string>
#include <utility>

#include "cc/base/containers.h"
#include "cc/scheduler/orders.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// Blocks offered to the host tier in one plan: bounds what planning pays for write-back.
constexpr size_t kMaxStoresPerPlan = 256;

void AddBlocks(const std::vector<BlockPlace>& places, Transfer& order) {
  for (const BlockPlace& place : places) {
    order.groups.push_back(place.group);
    order.columns.push_back(place.column);
    order.device_blocks.push_back(place.block.value());
  }
}

}  // namespace

void Scheduler::StartStores() {
  for (const StoredBlock& stored : cache_.TakeStored()) to_store_.push_back(stored);
  while (static_cast<int32_t>(to_store_.size()) > config_.num_blocks * cache_.num_groups()) {
    to_store_.pop_front();
  }
  Transfer order = OrderOf(TransferKind::kStore, nullptr, -1);
  TransferTicket ticket{.kind = TransferKind::kStore};
  std::vector<StoredBlock> queue;
  for (size_t n = 0; n < kMaxStoresPerPlan && !to_store_.empty(); n += queue.size()) {
    const StoredBlock stored = to_store_.front();
    to_store_.pop_front();
    queue.clear();
    // Evicted before its turn: a hit less.
    if (cache_.index().IsFresh(stored.node)) QueueWithAncestors(stored, queue);
    for (const StoredBlock& next : queue) {
      if (!AddToStore(next, order, ticket)) break;
    }
  }
  if (!order.device_blocks.empty()) transfers_.Start(std::move(order), std::move(ticket));
}

// A block stands in the host tier only behind the one before it. Those that are missing there,
// because their copy failed or they were driven out, are stored first.
void Scheduler::QueueWithAncestors(const StoredBlock& stored,
                                   std::vector<StoredBlock>& queue) const {
  const PrefixIndex& index = cache_.index();
  const auto is_there = [&](BlockId node, int32_t group) {
    const uint64_t hash = index.Describe(node).hash;
    return host_.Contains(hash, group) || storing_.contains({hash, group});
  };
  const BlockId node = stored.node.node;
  if (stored.group > 0) {
    const bool wanted = cache_.BlockOf(node, stored.group).valid() && !is_there(node, stored.group);
    if (wanted) queue.push_back(stored);
    return;
  }
  for (BlockId at = node; at.valid() && !is_there(at, 0); at = index.ParentOf(at)) {
    queue.push_back({index.CursorAt(at, 0), 0});
  }
  std::ranges::reverse(queue);
}

bool Scheduler::AddToStore(const StoredBlock& stored, Transfer& order, TransferTicket& ticket) {
  const BlockId node = stored.node.node;
  const auto content = cache_.index().Describe(node);
  BlockRef target = host_.Reserve(stored.group);
  if (!target) return false;  // a full tier costs hits and nothing else
  order.groups.push_back(stored.group);
  order.device_blocks.push_back(cache_.BlockOf(node, stored.group).value());
  order.host_blocks.push_back(target.id().value());
  storing_.emplace(content.hash, stored.group);
  ticket.device_sources.push_back(cache_.index().Pin(node));
  if (stored.group > 0) ticket.side_sources.push_back(cache_.PinSide(node, stored.group));
  ticket.host_targets.push_back(std::move(target));
  ticket.keys.push_back({content.identity,
                         content.hash,
                         content.parent_hash,
                         {content.tokens.begin(), content.tokens.end()},
                         stored.group});
  return true;
}

void Scheduler::StartLoad(Request& request, const std::vector<BlockPlace>& incoming) {
  Transfer order = OrderOf(TransferKind::kLoad, request);
  order.first_token = request.settled;
  order.num_tokens = request.scheduled;
  AddBlocks(incoming, order);
  TransferTicket ticket{
      .kind = TransferKind::kLoad, .request = &request, .num_tokens = request.scheduled};
  const Identity identity = IdentityOf(request);
  const Content content = ContentOf(request);
  for (const BlockPlace& place : incoming) {
    // The state is the one behind the last block.
    const bool is_state = cache_.group(place.group).kind == GroupKind::kState;
    const int32_t column = is_state ? request.scheduled / config_.block_size - 1 : place.column;
    const HostId source = host_.Find(AskFor(identity, content, {place.group, column, {}}));
    order.host_blocks.push_back(host_.BlockOf(source).value());
    ticket.host_sources.push_back(host_.Pin(source));
  }
  transferring_.push_back(&request);
  request.transfer = transfers_.Start(std::move(order), std::move(ticket));
}

void Scheduler::StartReceive(Request& request, const std::vector<BlockPlace>& incoming) {
  Transfer order = OrderOf(TransferKind::kReceive, request);
  order.first_token = request.settled;
  order.num_tokens = request.log.size();
  AddBlocks(incoming, order);
  transferring_.push_back(&request);
  request.transfer =
      transfers_.Start(std::move(order), {.kind = TransferKind::kReceive, .request = &request});
}

void Scheduler::StartSend(Request& request) {
  EraseFirst(decoding_, &request);
  Advance<AwaitingFirstToken>(request, event::Send{});
  Transfer order = OrderOf(TransferKind::kSend, request);
  order.num_tokens = request.log.num_prompt();
  AddBlocks(cache_.Needed(*HomeOf(request.state), order.num_tokens), order);
  transferring_.push_back(&request);
  request.transfer =
      transfers_.Start(std::move(order), {.kind = TransferKind::kSend, .request = &request});
}

Status Scheduler::ValidateTransferResult(int64_t id, const TransferResult& result) {
  const TransferTicket* found = transfers_.Find(id);
  if (found == nullptr)
    return Status::Invalid("transfer " + std::to_string(id) + " is not in flight");
  if (found->kind == TransferKind::kReceive && result.ok && result.first_token < 0) {
    return Status::Invalid("a receive that went well needs its first_token");
  }
  const bool asks = found->kind == TransferKind::kQuery || found->kind == TransferKind::kGet;
  const size_t num_wanted = asks && result.ok ? found->keys.size() : 0;
  if (result.done.size() != num_wanted) {
    return Status::Invalid("done must have " + std::to_string(num_wanted) + " entries, got " +
                           std::to_string(result.done.size()));
  }
  return Status::Ok();
}

Result<std::shared_ptr<const Outcome>> Scheduler::SettleTransfer(int64_t id,
                                                                 const TransferResult& result) {
  if (Status status = ValidateTransferResult(id, result); !status.ok()) return status;
  TransferTicket ticket = transfers_.Take(id);
  auto outcome = std::make_shared<Outcome>();
  if (ticket.request != nullptr) ticket.request->transfer = -1;
  switch (ticket.kind) {
    case TransferKind::kStore:
      SettleStore(std::move(ticket), result.ok);
      break;
    case TransferKind::kLoad:
      SettleLoad(std::move(ticket), result.ok);
      break;
    case TransferKind::kSend:
    case TransferKind::kReceive:
      SettleRemote(std::move(ticket), result.ok, result.first_token, *outcome);
      break;
    case TransferKind::kQuery:
      SettleQuery(std::move(ticket), result);
      break;
    case TransferKind::kGet:
      SettleGet(std::move(ticket), result);
      break;
    case TransferKind::kPut:
      SettlePut(std::move(ticket), result.ok);
      break;
    case TransferKind::kCancel:  // is never in flight
      break;
  }
  return std::shared_ptr<const Outcome>(std::move(outcome));
}

void Scheduler::SettleStore(TransferTicket ticket, bool ok) {
  for (const HostKey& key : ticket.keys) storing_.erase({key.hash, key.group});
  // Of one that failed, the reservations die with the ticket.
  for (size_t i = 0; ok && i < ticket.keys.size(); ++i) {
    const PutName name{ticket.keys[i].hash, ticket.keys[i].group};
    const bool kept = host_.Commit(std::move(ticket.host_targets[i]), std::move(ticket.keys[i]));
    if (kept && config_.store.enabled) to_put_.push_back(name);
  }
  // What one transfer had no room for, and what is new here: nobody may plan for a while.
  StartStores();
  if (config_.store.enabled) StartPuts();
}

void Scheduler::SettleLoad(TransferTicket ticket, bool ok) {
  Request& request = *ticket.request;
  std::vector<HostId> sources;
  sources.reserve(ticket.host_sources.size());
  for (const HostPin& pin : ticket.host_sources) sources.push_back(pin.entry());
  ticket.host_sources.clear();
  if (ok) {
    request.settled = ticket.num_tokens;
  } else {
    request.num_void_rows = request.rows_in_flight;
    request.state_tokens = -1;
    // Leaves first, so that none keeps its parent.
    for (const HostId source : std::views::reverse(sources)) host_.DropIfIdle(source);
  }
  if (ticket.estate) {  // it ended while its blocks were coming
    MoveOut(request, std::move(*ticket.estate));
    return DrainIfDone(request);
  }
  if (std::holds_alternative<Finishing>(request.state)) return;  // its last row drains it
  if (!ok) return RestartWithoutLoad(request);
  if (std::holds_alternative<Restoring>(request.state)) {
    EraseFirst(transferring_, &request);
    Advance<Restoring>(request, event::Restored{});
    prefilling_.push_back(&request);
  }
  cache_.ShareSides(*HomeOf(request.state), request.settled);
  PublishSettled(request);
}

void Scheduler::RestartWithoutLoad(Request& request) {
  // Nothing of what it counted as cached has served it yet.
  const bool is_first = request.counters.num_retractions == 0 && request.log.num_output() == 0;
  if (is_first) request.counters.admitted_step = -1;
  request.retracted_step = next_step_;
  Depart(request,
         LeaveFrom<Restoring, Prefilling, AwaitingFirstToken>(request, event::RestoreFailed{}));
  request.hit = {};
  waiting_.Add(request);
}

void Scheduler::RunBehindLoad(Request& request) {
  EraseFirst(transferring_, &request);
  Advance<Restoring>(request, event::LayersReady{});
  prefilling_.push_back(&request);
}

Status Scheduler::ProgressTransfer(int64_t id, int32_t layers_done) {
  TransferTicket* found = transfers_.Find(id);
  if (found == nullptr || found->kind != TransferKind::kLoad)
    return Status::Invalid("transfer " + std::to_string(id) + " is no load in flight");
  if (layers_done < found->layers_done || layers_done > config_.num_layers) {
    return Status::Invalid("layers_done must be between " + std::to_string(found->layers_done) +
                           " and " + std::to_string(config_.num_layers) + ", got " +
                           std::to_string(layers_done));
  }
  found->layers_done = layers_done;
  const bool waits = std::holds_alternative<Restoring>(found->request->state);
  const bool may_run = config_.load_lead_layers < config_.num_layers;
  if (waits && may_run && layers_done >= config_.load_lead_layers) RunBehindLoad(*found->request);
  return Status::Ok();
}

void Scheduler::SettleRemote(TransferTicket ticket, bool ok, int32_t first_token,
                             Outcome& outcome) {
  Request& request = *ticket.request;
  const bool receives = ticket.kind == TransferKind::kReceive;
  if (receives && ok) request.settled = request.scheduled = request.log.num_prompt();
  if (ticket.estate) {  // its end was told when it was aborted
    MoveOut(request, std::move(*ticket.estate));
    return DrainIfDone(request);
  }
  if (receives && ok) return AcceptRemoteToken(request, first_token, outcome);
  const Finish finish = ok ? Finish::kLength : Finish::kAbort;
  Report(request, -1, 0, finish, outcome);
  if (ok) {
    Depart(request, LeaveFrom<Sending>(request, event::Sent{}));
  } else {
    Depart(request, LeaveFrom<Sending, RemotePrefilling>(request, event::PeerFailed{}));
  }
  MoveToLeaving(request);
  DrainIfDone(request);
}

void Scheduler::AcceptRemoteToken(Request& request, int32_t token, Outcome& outcome) {
  EraseFirst(transferring_, &request);
  Advance<RemotePrefilling>(request, event::Received{});
  InsertDecoding(request);
  request.last_step = StepId(next_step_ - 1);
  request.counters.prefill_done_step = next_step_;
  request.state_tokens = request.settled;
  request.state_column = request.next_state_column = 0;
  cache_.ShareSides(*HomeOf(request.state), request.settled);
  Finish finish = Finish::kNone;
  AcceptTokens(request, {&token, 1}, finish);
  Report(request, -1, 1, finish, outcome);
  PublishSettled(request);
  if (finish == Finish::kNone) return Advance<AwaitingFirstToken>(request, event::TokenSettled{});
  Complete(request, finish);
  DrainIfDone(request);
}

}  // namespace tokenspeed
