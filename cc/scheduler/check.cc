// SPDX-License-Identifier: MIT

#include <algorithm>
#include <vector>

#include "cc/scheduler/scheduler.h"

namespace tokenspeed {

void Scheduler::CheckInvariants() const {
  cache_.index().Check();
  CheckBlocks();
  CheckRequests();
}

void Scheduler::CheckBlocks() const {
  const BlockPool& pool = cache_.pool();
  std::vector<bool> seen(static_cast<size_t>(pool.num_total()) + 1, false);
  int32_t num_held = 0;
  int32_t num_homes = 0;
  const auto visit = [&](const Residence& residence) {
    ++num_homes;
    for (const BlockRef& block : residence.columns()) {
      if (!block) continue;
      Check(!seen[block.id().index()], "no block is held twice");
      Check(!pool.IsFree(block.id()), "a held block is not free");
      Check(!cache_.index().Contains(block.id()), "a held block is not in the prefix index");
      seen[block.id().index()] = true;
      ++num_held;
    }
  };
  for (const auto* residents : {&prefilling_, &decoding_, &transferring_}) {
    for (Request* request : *residents) visit(*HomeOf(request->state));
  }
  for (const Ticket& ticket : tickets_) {
    for (const Estate& estate : ticket.estates) visit(estate.residence);
  }
  int32_t num_host_targets = 0;
  for (const auto& [id, ticket] : transfers_) {
    if (ticket.estate) visit(*ticket.estate);
    num_host_targets += static_cast<int32_t>(ticket.host_targets.size());
  }
  host_.Check();
  Check(host_.num_reserved() == num_host_targets, "free + reserved + stored host blocks == total");
  Check(pool.num_free() + num_held + cache_.index().num_cached() == pool.num_total(),
        "free + held + cached blocks == total");
  Check(cache_.slots().num_free() + num_homes == cache_.slots().num_slots(),
        "free + held slots == total");
}

void Scheduler::CheckRequests() const {
  const auto num_resident = prefilling_.size() + decoding_.size() + transferring_.size();
  for (const Request* request : transferring_) {
    Check(request->transfer >= 0, "who waits for a transfer has one in flight");
  }
  Check(live_.size() == num_resident + static_cast<size_t>(waiting_.size()),
        "a live request waits, prefills or decodes");
  Check(claims_.size() <= num_resident, "only residents claim blocks");
  Check(std::ranges::is_sorted(decoding_, {}, [](const Request* r) { return r->key; }),
        "decoding requests stand in the order of their keys");
  int64_t rows_counted = 0;
  for (const auto& [id, request] : live_) rows_counted += request->rows_in_flight;
  for (const auto& request : leaving_) {
    Check(std::holds_alternative<Finishing>(request->state), "who leaves is finishing");
    Check(request->rows_in_flight > 0 || request->transfer >= 0,
          "who leaves has a row or a transfer in flight");
    rows_counted += request->rows_in_flight;
  }
  int64_t rows_in_tickets = 0;
  for (size_t i = 0; i < tickets_.size(); ++i) {
    rows_in_tickets += static_cast<int64_t>(tickets_[i].rows.size());
    Check(tickets_[i].copy_sources.size() == tickets_[i].plan->block_copies.size(),
          "the source of a copy is kept until the copy ran");
    for (const Row& row : tickets_[i].rows) {
      const auto is_heir = [&](const Ticket& ticket) {
        return std::ranges::any_of(ticket.estates,
                                   [&](const Estate& e) { return e.request == row.request; });
      };
      const bool kept =
          std::any_of(tickets_.begin() + static_cast<std::ptrdiff_t>(i), tickets_.end(), is_heir);
      Check(kept || HomeOf(row.request->state) != nullptr, "what a step in flight uses is held");
    }
  }
  Check(rows_counted == rows_in_tickets, "rows in flight are counted right");
  for (const auto* residents : {&prefilling_, &decoding_, &transferring_}) {
    for (Request* request : *residents) {
      const Residence& home = *HomeOf(request->state);
      Check(home.num_published() * config_.block_size <= request->settled,
            "what is published has settled");
      Check(request->settled <= request->scheduled, "what has settled was scheduled");
      Check(request->scheduled <= home.num_blocks() * config_.block_size,
            "what is scheduled has blocks to write to");
    }
  }
  for (const auto& [key, request] : waiting_) {
    Check(HomeOf(request->state) == nullptr, "who waits holds nothing");
  }
}

}  // namespace tokenspeed
