// SPDX-License-Identifier: MIT

#include "cc/cache/tier/host_tier.h"

#include <algorithm>

#include "cc/base/status.h"

namespace tokenspeed {
namespace {

bool WholeParents(const std::vector<CacheGroup>& groups) {
  return groups.size() == 1 && groups[0].blocks_per_parent == 1;
}

int32_t NumEntries(int32_t num_blocks, const std::vector<CacheGroup>& groups) {
  int32_t entries = 0;
  for (const CacheGroup& group : groups) entries += (num_blocks + 1) * group.blocks_per_parent;
  return entries;
}

}  // namespace

HostPin::~HostPin() {
  if (tier_ != nullptr) tier_->Unpin(entry_);
}

HostTier::HostTier(int32_t num_blocks, const std::vector<CacheGroup>& groups)
    : parents_(num_blocks + 1),
      entries_(num_blocks == 0 ? 0 : static_cast<size_t>(NumEntries(num_blocks, groups))),
      evict_order_(static_cast<int32_t>(entries_.size())) {
  int32_t first = 0;
  for (const CacheGroup& group : groups) {
    if (!WholeParents(groups))
      split_.push_back(std::make_unique<GroupPool>(parents_, group.blocks_per_parent));
    first_entry_.push_back(first);
    first += (num_blocks + 1) * group.blocks_per_parent;
  }
}

BlockSource& HostTier::source(int32_t group) {
  if (split_.empty()) return parents_;
  return *split_[static_cast<size_t>(group)];
}

int32_t HostTier::num_taken() const {
  int32_t taken = split_.empty() ? parents_.num_total() - parents_.num_free() : 0;
  for (const auto& pool : split_) taken += pool->num_taken();
  return taken;
}

HostId HostTier::Find(const HostQuery& query) const {
  const auto found = by_hash_.find({query.hash, query.group});
  if (found == by_hash_.end()) return {};
  const HostKey& mine = at(found->second).key;
  const bool same = mine.identity == query.identity && mine.parent_hash == query.parent_hash &&
                    std::ranges::equal(mine.tokens, query.tokens);
  return same ? found->second : HostId();
}

HostId HostTier::ParentOf(const HostKey& key) const {
  if (key.group != 0 || !key.has_parent()) return {};
  const auto found = by_hash_.find({key.parent_hash, 0});
  return found == by_hash_.end() ? HostId() : found->second;
}

BlockRef HostTier::Reserve(int32_t group) {
  BlockRef block = source(group).Take();
  while (!block && !evict_order_.empty()) {
    {
      const BlockRef evicted = Remove(evict_order_.Oldest());
    }
    block = source(group).Take();
  }
  return block;
}

bool HostTier::Commit(BlockRef block, HostKey key) {
  const HostId parent = ParentOf(key);
  if (key.group == 0 && key.has_parent() && !parent.valid()) return false;
  const HostId id = EntryFor(key.group, block.id());
  if (!by_hash_.emplace(Name{key.hash, key.group}, id).second) return false;
  if (parent.valid() && at(parent).num_children++ == 0 && evict_order_.Contains(parent)) {
    evict_order_.Remove(parent);
  }
  Entry& entry = at(id);
  entry.block = std::move(block);
  entry.key = std::move(key);
  entry.last_use = ++clock_;
  OfferToEvict(id);
  const HostKey& told = entry.key;
  if (events_.enabled() && told.group == 0) {
    events_.Add(
        BlockStored{Medium::kHost, told.hash, told.parent_hash, told.has_parent(), told.tokens});
  }
  return true;
}

void HostTier::OfferToEvict(HostId entry) {
  const Entry& e = at(entry);
  if (e.num_pins == 0 && e.num_children == 0) evict_order_.Add(entry, e.last_use);
}

HostPin HostTier::Pin(HostId entry) {
  if (at(entry).num_pins++ == 0 && evict_order_.Contains(entry)) evict_order_.Remove(entry);
  return HostPin(this, entry);
}

void HostTier::Unpin(HostId entry) {
  at(entry).last_use = ++clock_;
  if (--at(entry).num_pins == 0) OfferToEvict(entry);
}

void HostTier::DropIfIdle(HostId entry) {
  if (evict_order_.Contains(entry)) (void)Remove(entry);
}

void HostTier::Clear() {
  while (!evict_order_.empty()) (void)Remove(evict_order_.Oldest());
}

BlockRef HostTier::Remove(HostId id) {
  Entry& entry = at(id);
  evict_order_.Remove(id);
  by_hash_.erase({entry.key.hash, entry.key.group});
  if (entry.key.group == 0) events_.Add(BlockRemoved{Medium::kHost, entry.key.hash});
  if (const HostId parent = ParentOf(entry.key); parent.valid()) {
    // A use of a child was a use of its parent.
    at(parent).last_use = std::max(at(parent).last_use, entry.last_use);
    if (--at(parent).num_children == 0) OfferToEvict(parent);
  }
  BlockRef freed = std::move(entry.block);
  entry = Entry();
  return freed;
}

void HostTier::Check() const {
  int32_t owned = 0;
  std::vector<int32_t> children(entries_.size(), 0);
  for (const Entry& entry : entries_) {
    if (!entry.block || entry.key.group != 0 || !entry.key.has_parent()) continue;
    const HostId parent = ParentOf(entry.key);
    tokenspeed::Check(parent.valid(), "no host entry is stranded");
    ++children[parent.index()];
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (!entry.block) continue;
    ++owned;
    const HostId id(static_cast<int32_t>(i));
    tokenspeed::Check(EntryFor(entry.key.group, entry.block.id()) == id,
                      "a host entry owns its block");
    const auto found = by_hash_.find({entry.key.hash, entry.key.group});
    tokenspeed::Check(found != by_hash_.end() && found->second == id,
                      "a host entry is found by its hash");
    tokenspeed::Check(entry.num_children == children[i], "children of a host entry are counted");
    const bool idle_leaf = entry.num_pins == 0 && entry.num_children == 0;
    tokenspeed::Check(evict_order_.Contains(id) == idle_leaf,
                      "exactly the host entries without a reader or a child can be evicted");
  }
  tokenspeed::Check(owned == num_entries(), "host entries are counted right");
}

}  // namespace tokenspeed
