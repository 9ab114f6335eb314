// SPDX-License-Identifier: MIT

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "cc/base/containers.h"
#include "cc/scheduler/orders.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed {
namespace {

// How far into the queue requests are looked at whose prefix the store may have.
constexpr int kMaxAhead = 64;
// Blocks that one put carries: bounds what planning pays for it, and what a late one holds.
constexpr size_t kMaxBlocksPerPut = 64;

}  // namespace

Status Scheduler::AdvanceClock(int64_t now_us) {
  if (now_us < now_us_) {
    return Status::Invalid("now_us must not go back: it was " + std::to_string(now_us_) + ", got " +
                           std::to_string(now_us));
  }
  now_us_ = now_us;
  for (auto& [id, ticket] : transfers_) {
    if (ticket.deadline_us < 0 || ticket.deadline_us > now_us || ticket.is_cancelled) continue;
    store_counters_.num_timeouts += 1;
    (ticket.kind == TransferKind::kPut ? put_health_ : ask_health_).Failed(now_us);
    Request* request = ticket.request;
    Cancel(id, ticket);
    if (request != nullptr) GoOnWithoutStore(*request);
  }
  return Status::Ok();
}

// What it holds in the host tier stays held until it is settled: the store may still write there.
void Scheduler::Cancel(int64_t id, TransferTicket& ticket) {
  ticket.is_cancelled = true;
  ticket.request = nullptr;
  Transfer order = OrderOf(TransferKind::kCancel, nullptr, -1);
  order.target = id;
  transfers_.Tell(std::move(order));
}

void Scheduler::GoOnWithoutStore(Request& request) {
  request.transfer = -1;
  Advance<Prefetching>(request, event::Prefetched{});
}

void Scheduler::StartPrefetches() {
  if (!config_.store.enabled || paused_ || config_.role == Role::kDecode) return;
  int num_seen = 0;
  for (const auto& [key, request] : waiting_) {
    if (++num_seen > kMaxAhead || num_asks_ >= config_.store.max_prefetches) return;
    if (request->asked_store || !std::holds_alternative<Submitted>(request->state)) continue;
    if (!ask_health_.MayAsk(now_us_, num_asks_)) {
      // It is not asked later either: then it may as well be computed.
      request->asked_store = true;
      store_counters_.num_skipped += 1;
      continue;
    }
    if (IsBlockedByClaim(*request)) continue;  // somebody computes it just now
    request->asked_store = true;
    if (IsWorthAsking(*request, IdentityOf(*request))) StartQuery(*request);
  }
}

bool Scheduler::IsWorthAsking(Request& request, const Identity& identity) {
  const Content content = ContentOf(request);
  const int32_t limit = (request.log.size() - 1) / config_.block_size;
  int32_t on_host = 0;
  while (on_host < limit && host_.Find(AskFor(identity, content, {0, on_host, {}})).valid())
    ++on_host;
  if (limit - std::max(on_host, request.hit.num_blocks) < config_.store.min_blocks) return false;
  // The host tier keeps a block only behind the one before it.
  if (on_host >= request.hit.num_blocks) return true;
  store_counters_.num_skipped += 1;
  return false;
}

// Blocks behind what the device has that no tier of this engine holds, parents first; of windows
// and states those from which somebody could go on there.
std::vector<BlockPlace> Scheduler::MissingHere(const Request& request, const Content& content) {
  const Identity identity = IdentityOf(request);
  const int32_t limit = (request.log.size() - 1) / config_.block_size;
  std::vector<BlockPlace> missing;
  for (int32_t g = 0; g < cache_.num_groups(); ++g) {
    const CacheGroup& group = cache_.group(g);
    const int32_t start = (request.hit.num_blocks + 1) * config_.block_size;
    int32_t column = request.hit.num_blocks;
    if (group.kind == GroupKind::kWindow) {
      column = std::min(column, group.FirstLiveBlock(start, config_.block_size));
    }
    for (; column < limit; ++column) {
      const BlockPlace place{g, column, {}};
      if (!host_.Find(AskFor(identity, content, place)).valid()) missing.push_back(place);
    }
  }
  return missing;
}

void Scheduler::AddKey(HostKey key, Transfer& order, TransferTicket& ticket) const {
  order.groups.push_back(key.group);
  order.hashes.push_back(key.hash);
  order.parent_hashes.push_back(key.parent_hash);
  order.token_ids.insert(order.token_ids.end(), key.tokens.begin(), key.tokens.end());
  ticket.keys.push_back(std::move(key));
}

void Scheduler::StartQuery(Request& request) {
  const Content content = ContentOf(request);
  const Identity identity = IdentityOf(request);
  const int64_t deadline_us = now_us_ + config_.store.prefetch_timeout_us;
  Transfer order = OrderOf(TransferKind::kQuery, &request, -1);
  order.deadline_us = deadline_us;
  TransferTicket ticket{
      .kind = TransferKind::kQuery, .request = &request, .deadline_us = deadline_us};
  for (const BlockPlace& place : MissingHere(request, content)) {
    AddKey(AskFor(identity, content, place).Key(), order, ticket);
    order.columns.push_back(place.column);
    ticket.columns.push_back(place.column);
  }
  store_counters_.num_queries += 1;
  num_asks_ += 1;
  Advance<Submitted>(request, event::Prefetch{deadline_us});
  request.transfer = transfers_.Start(std::move(order), std::move(ticket));
}

void Scheduler::SettleQuery(TransferTicket ticket, const TransferResult& result) {
  num_asks_ -= 1;
  Judge(ask_health_, ticket, result.ok);
  if (ticket.request == nullptr) return;
  Request& request = *ticket.request;
  // The weights may have changed since: what was asked for is of no use then.
  const bool is_same = ticket.keys.front().identity == IdentityOf(request);
  if (result.ok && is_same) StartGet(request, ticket, result.done);
  if (request.transfer < 0) GoOnWithoutStore(request);
}

void Scheduler::StartGet(Request& request, const TransferTicket& query,
                         std::span<const uint8_t> done) {
  const Identity identity = IdentityOf(request);
  (void)IsBlockedByClaim(request);  // brings its hit up to date
  const Content content = ContentOf(request);
  std::set<std::pair<int32_t, int32_t>> in_store;
  for (size_t i = 0; i < done.size(); ++i) {
    if (done[i] != 0) in_store.emplace(query.keys[i].group, query.columns[i]);
  }
  const auto on_host = [&](int32_t group, int32_t column) {
    return host_.Find(AskFor(identity, content, {group, column, {}}));
  };
  const auto elsewhere = [&](int32_t group, int32_t column) {
    return in_store.contains({group, column}) || on_host(group, column).valid();
  };
  const int32_t limit = (request.log.size() - 1) / config_.block_size;
  int32_t reach = request.hit.num_blocks;
  while (reach < limit && elsewhere(0, reach)) ++reach;
  const int32_t depth = cache_.Joint(request.hit, reach, elsewhere);
  if (depth <= HostDepth(request, identity, content)) return;

  const int64_t deadline_us = std::get<Prefetching>(request.state).deadline_us;
  Transfer order = OrderOf(TransferKind::kGet, &request, -1);
  order.deadline_us = deadline_us;
  TransferTicket ticket{
      .kind = TransferKind::kGet, .request = &request, .deadline_us = deadline_us};
  for (int32_t column = 0; column < depth; ++column) {
    // What it will hang behind must not be evicted for it.
    if (const HostId entry = on_host(0, column); entry.valid())
      ticket.host_sources.push_back(host_.Pin(entry));
  }
  for (const auto& [group, column] : in_store) {
    const bool is_state = cache_.group(group).kind == GroupKind::kState;
    const int32_t first =
        cache_.group(group).FirstLiveBlock(depth * config_.block_size, config_.block_size);
    if (column >= depth || column < first || (is_state && column != depth - 1)) continue;
    if (on_host(group, column).valid()) continue;
    BlockRef target = host_.Reserve(group);
    if (!target) break;  // a full tier costs hits and nothing else
    order.columns.push_back(column);
    order.host_blocks.push_back(target.id().value());
    ticket.columns.push_back(column);
    ticket.host_targets.push_back(std::move(target));
    AddKey(AskFor(identity, content, {group, column, {}}).Key(), order, ticket);
  }
  if (order.host_blocks.empty()) {
    store_counters_.num_skipped += 1;
    return;
  }
  store_counters_.num_gets += 1;
  num_asks_ += 1;
  request.transfer = transfers_.Start(std::move(order), std::move(ticket));
}

void Scheduler::SettleGet(TransferTicket ticket, const TransferResult& result) {
  num_asks_ -= 1;
  Judge(ask_health_, ticket, result.ok);
  int32_t first = -1;
  int32_t end = 0;
  bool is_whole = result.ok;
  for (size_t i = 0; i < result.done.size(); ++i) {
    is_whole = is_whole && result.done[i] != 0;
    if (result.done[i] == 0) continue;
    const int32_t group = ticket.keys[i].group;
    const bool kept = host_.Commit(std::move(ticket.host_targets[i]), std::move(ticket.keys[i]));
    if (!kept || group != 0) continue;
    first = first < 0 ? ticket.columns[i] : first;
    end = ticket.columns[i] + 1;
    store_counters_.hit_tokens += config_.block_size;
  }
  if (result.ok && !is_whole) store_counters_.num_partial_gets += 1;
  if (ticket.request == nullptr) return;
  ticket.request->first_fetched = std::max(first, 0);
  ticket.request->end_fetched = end;
  GoOnWithoutStore(*ticket.request);
}

void Scheduler::StartPuts() {
  while (static_cast<int32_t>(to_put_.size()) > config_.num_host_blocks * cache_.num_groups()) {
    to_put_.pop_front();
  }
  while (!to_put_.empty() && num_puts_ < config_.store.max_puts &&
         put_health_.MayAsk(now_us_, num_puts_)) {
    if (!StartPut()) return;
  }
}

bool Scheduler::StartPut() {
  Transfer order = OrderOf(TransferKind::kPut, nullptr, -1);
  order.deadline_us = now_us_ + config_.store.put_timeout_us;
  TransferTicket ticket{.kind = TransferKind::kPut, .deadline_us = order.deadline_us};
  for (; !to_put_.empty() && ticket.keys.size() < kMaxBlocksPerPut; to_put_.pop_front()) {
    const HostId entry = host_.Named(to_put_.front().hash, to_put_.front().group);
    if (!entry.valid()) continue;  // evicted before its turn: a hit less
    order.host_blocks.push_back(host_.BlockOf(entry).value());
    ticket.host_sources.push_back(host_.Pin(entry));
    AddKey(host_.KeyOf(entry), order, ticket);
  }
  if (ticket.keys.empty()) return false;
  num_puts_ += 1;
  transfers_.Start(std::move(order), std::move(ticket));
  return true;
}

void Scheduler::SettlePut(TransferTicket ticket, bool ok) {
  num_puts_ -= 1;
  Judge(put_health_, ticket, ok);
  if (ok) store_counters_.num_puts += static_cast<int64_t>(ticket.keys.size());
  StartPuts();
}

void Scheduler::Judge(StoreHealth& health, const TransferTicket& ticket, bool ok) {
  if (ticket.is_cancelled) return;  // judged when it was late, or nobody waited any more
  if (ok) return health.Succeeded();
  store_counters_.num_failures += 1;
  health.Failed(now_us_);
}

}  // namespace tokenspeed
