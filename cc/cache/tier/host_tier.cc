// SPDX-License-Identifier: MIT

#include "cc/cache/tier/host_tier.h"

#include <algorithm>

#include "cc/base/status.h"

namespace tokenspeed {

HostPin::~HostPin() {
  if (tier_ != nullptr) tier_->Unpin(block_);
}

HostTier::HostTier(int32_t num_blocks)
    : num_blocks_(num_blocks),
      pool_(num_blocks + 1),
      entries_(static_cast<size_t>(num_blocks) + 1),
      evict_order_(num_blocks + 1) {}

BlockId HostTier::Find(const Identity& identity, uint64_t hash, uint64_t parent_hash,
                       std::span<const int32_t> tokens) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return {};
  const HostKey& key = entries_[found->second.index()].key;
  const bool same = key.identity == identity && key.parent_hash == parent_hash &&
                    std::ranges::equal(key.tokens, tokens);
  return same ? found->second : BlockId();
}

BlockRef HostTier::Reserve() {
  if (BlockRef block = pool_.Take()) return block;
  if (evict_order_.empty()) return {};
  return Remove(evict_order_.Oldest());
}

void HostTier::Commit(BlockRef block, HostKey key) {
  const BlockId id = block.id();
  if (!by_hash_.emplace(key.hash, id).second)
    return;  // the copy was not needed; its block is free again
  Entry& entry = at(id);
  entry.block = std::move(block);
  entry.key = std::move(key);
  if (events_.enabled()) {
    const HostKey& told = entry.key;
    const bool has_parent = told.parent_hash != told.identity.RootHash();
    events_.Add(BlockStored{Medium::kHost, told.hash, told.parent_hash, has_parent, told.tokens});
  }
  entry.last_use = ++clock_;
  evict_order_.Add(id, entry.last_use);
}

HostPin HostTier::Pin(BlockId block) {
  Entry& entry = at(block);
  if (entry.num_pins++ == 0) evict_order_.Remove(block);
  return HostPin(this, block);
}

void HostTier::Unpin(BlockId block) {
  Entry& entry = at(block);
  entry.last_use = ++clock_;
  if (--entry.num_pins == 0) evict_order_.Add(block, entry.last_use);
}

void HostTier::DropIfIdle(BlockId block) {
  if (at(block).block && at(block).num_pins == 0) (void)Remove(block);
}

void HostTier::Clear() {
  while (!evict_order_.empty()) (void)Remove(evict_order_.Oldest());
}

BlockRef HostTier::Remove(BlockId block) {
  evict_order_.Remove(block);
  by_hash_.erase(at(block).key.hash);
  events_.Add(BlockRemoved{Medium::kHost, at(block).key.hash});
  BlockRef freed = std::move(at(block).block);
  at(block) = Entry();
  return freed;
}

void HostTier::Check() const {
  int32_t owned = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (!entry.block) continue;
    ++owned;
    const BlockId id(static_cast<int32_t>(i));
    tokenspeed::Check(entry.block.id() == id, "a host entry owns its block");
    const auto found = by_hash_.find(entry.key.hash);
    tokenspeed::Check(found != by_hash_.end() && found->second == id,
                      "a host entry is found by its hash");
    tokenspeed::Check(evict_order_.Contains(id) == (entry.num_pins == 0),
                      "exactly the host entries without a reader can be evicted");
  }
  tokenspeed::Check(owned == num_entries(), "host entries are counted right");
}

}  // namespace tokenspeed
