// SPDX-License-Identifier: MIT

#include <algorithm>
#include <string>
#include <utility>

#include "cc/base/containers.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// Blocks offered to the host tier in one plan: bounds what planning pays for write-back.
constexpr size_t kMaxStoresPerPlan = 256;

}  // namespace

void Scheduler::StartStores() {
  for (const PrefixCursor& stored : cache_.index().TakeStored()) to_store_.push_back(stored);
  while (static_cast<int32_t>(to_store_.size()) > config_.num_blocks) to_store_.pop_front();
  Transfer order{.id = -1,
                 .kind = TransferKind::kStore,
                 .request_id = -1,
                 .slot = -1,
                 .first_token = 0,
                 .num_tokens = 0,
                 .device_blocks = {},
                 .host_blocks = {}};
  TransferTicket ticket{.kind = TransferKind::kStore};
  for (size_t n = 0; n < kMaxStoresPerPlan && !to_store_.empty(); ++n) {
    const PrefixCursor from = to_store_.front();
    to_store_.pop_front();
    if (!cache_.index().IsFresh(from)) continue;  // evicted before its turn: a hit less
    const auto content = cache_.index().Describe(from.node);
    if (host_.Contains(content.hash)) continue;
    BlockRef target = host_.Reserve();
    if (!target) continue;  // a full tier costs hits and nothing else
    order.device_blocks.push_back(from.node.value());
    order.host_blocks.push_back(target.id().value());
    ticket.device_sources.push_back(cache_.index().Pin(from.node));
    ticket.host_targets.push_back(std::move(target));
    ticket.keys.push_back({content.identity,
                           content.hash,
                           content.parent_hash,
                           {content.tokens.begin(), content.tokens.end()}});
  }
  if (!order.device_blocks.empty()) transfers_.Start(std::move(order), std::move(ticket));
}

void Scheduler::StartLoad(Request& request, const std::vector<BlockId>& host_run) {
  const Residence& home = *HomeOf(request.state);
  Transfer order{.id = -1,
                 .kind = TransferKind::kLoad,
                 .request_id = request.id.value(),
                 .slot = home.slot().value(),
                 .first_token = request.settled,
                 .num_tokens = request.scheduled,
                 .device_blocks = {},
                 .host_blocks = {}};
  TransferTicket ticket{.kind = TransferKind::kLoad, .request = &request};
  auto column = static_cast<size_t>(home.num_published());
  for (const BlockId block : host_run) {
    order.device_blocks.push_back(home.columns()[column++].id().value());
    order.host_blocks.push_back(block.value());
    ticket.host_sources.push_back(host_.Pin(block));
  }
  transferring_.push_back(&request);
  request.transfer = transfers_.Start(std::move(order), std::move(ticket));
}

void Scheduler::StartReceive(Request& request) {
  const Residence& home = *HomeOf(request.state);
  Transfer order{.id = -1,
                 .kind = TransferKind::kReceive,
                 .request_id = request.id.value(),
                 .slot = home.slot().value(),
                 .first_token = request.settled,
                 .num_tokens = request.log.size(),
                 .device_blocks = {},
                 .host_blocks = {}};
  transferring_.push_back(&request);
  request.transfer =
      transfers_.Start(std::move(order), {.kind = TransferKind::kReceive, .request = &request});
}

void Scheduler::StartSend(Request& request) {
  EraseFirst(decoding_, &request);
  Advance<AwaitingFirstToken>(request, event::Send{});
  Transfer order{.id = -1,
                 .kind = TransferKind::kSend,
                 .request_id = request.id.value(),
                 .slot = HomeOf(request.state)->slot().value(),
                 .first_token = 0,
                 .num_tokens = request.log.num_prompt(),
                 .device_blocks = {},
                 .host_blocks = {}};
  transferring_.push_back(&request);
  request.transfer =
      transfers_.Start(std::move(order), {.kind = TransferKind::kSend, .request = &request});
}

Result<std::shared_ptr<const Outcome>> Scheduler::SettleTransfer(int64_t id, bool ok,
                                                                 int32_t first_token) {
  const TransferTicket* found = transfers_.Find(id);
  if (found == nullptr)
    return Status::Invalid("transfer " + std::to_string(id) + " is not in flight");
  if (found->kind == TransferKind::kReceive && ok && first_token < 0) {
    return Status::Invalid("a receive that went well needs its first_token");
  }
  TransferTicket ticket = transfers_.Take(id);
  auto outcome = std::make_shared<Outcome>();
  if (ticket.request != nullptr) ticket.request->transfer = -1;
  switch (ticket.kind) {
    case TransferKind::kStore:
      SettleStore(std::move(ticket), ok);
      break;
    case TransferKind::kLoad:
      SettleLoad(std::move(ticket), ok);
      break;
    case TransferKind::kSend:
    case TransferKind::kReceive:
      SettleRemote(std::move(ticket), ok, first_token, *outcome);
      break;
  }
  return std::shared_ptr<const Outcome>(std::move(outcome));
}

void Scheduler::SettleStore(TransferTicket ticket, bool ok) {
  if (!ok) return;  // the reservations die with the ticket
  for (size_t i = 0; i < ticket.keys.size(); ++i) {
    host_.Commit(std::move(ticket.host_targets[i]), std::move(ticket.keys[i]));
  }
}

void Scheduler::SettleLoad(TransferTicket ticket, bool ok) {
  Request& request = *ticket.request;
  std::vector<BlockId> sources;
  for (const HostPin& pin : ticket.host_sources) sources.push_back(pin.block());
  ticket.host_sources.clear();
  if (ok) {
    request.settled = request.scheduled;
  } else {
    for (const BlockId source : sources) host_.DropIfIdle(source);
  }
  if (ticket.estate) {  // it ended while its blocks were coming
    MoveOut(request, std::move(*ticket.estate));
    return DrainIfDone(request);
  }
  if (ok) {
    EraseFirst(transferring_, &request);
    Advance<Restoring>(request, event::Restored{});
    prefilling_.push_back(&request);
    return PublishSettled(request);
  }
  Depart(request, LeaveFrom<Restoring>(request, event::RestoreFailed{}));
  request.hit = {};
  waiting_.Add(request);
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
  Finish finish = Finish::kNone;
  AcceptTokens(request, {&token, 1}, finish);
  Report(request, -1, 1, finish, outcome);
  PublishSettled(request);
  if (finish == Finish::kNone) return Advance<AwaitingFirstToken>(request, event::TokenSettled{});
  Complete(request, finish);
  DrainIfDone(request);
}

}  // namespace tokenspeed
