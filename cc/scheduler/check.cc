// SPDX-License-Identifier: MIT

#include <algorithm>
#include <set>
#include <vector>

#include "cc/scheduler/scheduler.h"

namespace tokenspeed {

void Scheduler::CheckInvariants() const {
  cache_.Check();
  host_.Check();
  CheckBlocks();
  CheckRequests();
}

namespace {

// Counts what is held of one cache group, and that nothing is held twice.
class Holdings {
 public:
  explicit Holdings(const BlockSource& pool) : pool_(pool) {}
  void Add(const BlockRef& block) {
    if (!block) return;
    Check(seen_.insert(block.id()).second, "no block is held twice");
    Check(!pool_.IsFree(block.id()), "a held block is not free");
  }
  int32_t count() const { return static_cast<int32_t>(seen_.size()); }

 private:
  const BlockSource& pool_;
  std::set<BlockId> seen_;
};

}  // namespace

void Scheduler::CheckBlocks() const {
  std::vector<Holdings> held;
  held.reserve(static_cast<size_t>(cache_.num_groups()));
  for (int32_t g = 0; g < cache_.num_groups(); ++g) held.emplace_back(cache_.pool(g));
  int32_t num_homes = 0;
  const auto visit = [&](const Residence& residence) {
    ++num_homes;
    for (const BlockRef& block : residence.columns()) {
      held[0].Add(block);
      Check(!block || !cache_.index().Contains(block.id()),
            "a held block is not in the prefix index");
    }
    for (size_t side = 0; side < residence.sides().size(); ++side) {
      for (const BlockRef& block : residence.sides()[side].own) held[side + 1].Add(block);
      for (const SavedState& state : residence.sides()[side].saved) held[side + 1].Add(state.block);
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
  Check(host_.num_reserved() == num_host_targets, "free + reserved + stored host blocks == total");
  Check(cache_.slots().num_free() + num_homes == cache_.slots().num_slots(),
        "free + held slots == total");
  int32_t num_split = 0;
  for (int32_t g = 0; g < cache_.num_groups(); ++g) {
    const int32_t cached = g == 0 ? cache_.index().num_cached() : cache_.side(g).num_attached();
    int32_t of_others = 0;  // blocks of this size that memory split by the other groups would make
    for (int32_t other = 0; other < cache_.num_groups(); ++other) {
      if (other == g) continue;
      of_others += cache_.split(other)->num_parents() * cache_.group(g).blocks_per_parent;
    }
    Check(cache_.pool(g).num_free() + held[static_cast<size_t>(g)].count() + cached + of_others ==
              cache_.pool(g).num_total(),
          "free + held + cached blocks == total");
    num_split += cache_.split(g) == nullptr ? 0 : cache_.split(g)->num_parents();
  }
  Check(cache_.split(0) == nullptr ||
            cache_.parents().num_free() + num_split == cache_.parents().num_total(),
        "free parents + those split by a group == total");
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
