// SPDX-License-Identifier: MIT
//
// The second tier: copies of full device blocks in pinned host memory, so that what the device
// evicts can come back without being computed; also where blocks of the store arrive. Here are only
// numbers: which host block holds the content of which chained hash, for which cache group. Host
// memory is split by groups as the device is. Every copy is two-phase: `Reserve` takes a host block
// (evicting what was used longest ago, leaves first), the copy runs, then `Commit` makes an entry
// or the reservation dies and is free again. `HostPin` keeps an entry while it is read. A full tier
// costs hits, never correctness. Scheduler's thread only.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/base/ids.h"
#include "cc/cache/block_pool.h"
#include "cc/cache/evict_order.h"
#include "cc/cache/group.h"
#include "cc/cache/identity.h"
#include "cc/cache/kv_events.h"

namespace tokenspeed {

class HostTier;

// An entry of the host tier.
using HostId = Id<struct HostTag, int32_t>;

// Keeps one entry from eviction. Move-only.
class HostPin {
 public:
  HostPin() = default;
  HostPin(HostPin&& other) noexcept
      : tier_(std::exchange(other.tier_, nullptr)), entry_(std::exchange(other.entry_, HostId())) {}
  HostPin& operator=(HostPin&& other) noexcept {
    std::swap(tier_, other.tier_);
    std::swap(entry_, other.entry_);
    return *this;
  }
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;
  ~HostPin();
  HostId entry() const { return entry_; }

 private:
  friend class HostTier;
  HostPin(HostTier* tier, HostId entry) : tier_(tier), entry_(entry) {}
  HostTier* tier_ = nullptr;
  HostId entry_;
};

// What an entry stands for: the block of `group` for one full block of tokens behind a chain.
struct HostKey {
  Identity identity;
  uint64_t hash;
  uint64_t parent_hash;  // the identity's root hash for a first block
  std::vector<int32_t> tokens;
  int32_t group;

  bool has_parent() const { return parent_hash != identity.RootHash(); }
};

// The same without a copy of the tokens, to ask with.
struct HostQuery {
  const Identity& identity;
  uint64_t hash;
  uint64_t parent_hash;
  std::span<const int32_t> tokens;
  int32_t group;

  HostKey Key() const {
    return {identity, hash, parent_hash, {tokens.begin(), tokens.end()}, group};
  }
};

class HostTier {
 public:
  // `num_blocks` parents, numbered from 1, split as `groups` say. None: the tier is off, every
  // search misses.
  HostTier(int32_t num_blocks, const std::vector<CacheGroup>& groups);
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  bool enabled() const { return parents_.num_total() > 0; }
  // The entry that holds exactly what is asked for; invalid when there is none.
  HostId Find(const HostQuery& query) const;
  HostId Named(uint64_t hash, int32_t group) const {
    const auto found = by_hash_.find({hash, group});
    return found == by_hash_.end() ? HostId() : found->second;
  }
  bool Contains(uint64_t hash, int32_t group) const { return by_hash_.contains({hash, group}); }
  BlockId BlockOf(HostId entry) const { return at(entry).block.id(); }
  const HostKey& KeyOf(HostId entry) const { return at(entry).key; }

  // A host block of `group` to copy into; empty when all memory is pinned or being written.
  BlockRef Reserve(int32_t group);
  // The copy into `block` is done: it becomes the entry for `key`, unless one came first or, in
  // group 0, the block before it is not here. False then: the block is free again.
  bool Commit(BlockRef block, HostKey key);
  HostPin Pin(HostId entry);
  // Forgets an entry whose content turned out unreadable, unless a reader or a child has it.
  void DropIfIdle(HostId entry);
  // Forgets every entry that is not pinned; the caller tells that all is cleared.
  void Clear();
  KvEventLog& events() { return events_; }

  int32_t num_total() const { return parents_.num_total(); }
  // Whole parents that nothing is in.
  int32_t num_free() const { return parents_.num_free(); }
  // Blocks being copied into: neither free nor an entry.
  int32_t num_reserved() const { return num_taken() - num_entries(); }
  int32_t num_entries() const { return static_cast<int32_t>(by_hash_.size()); }
  void Check() const;

 private:
  friend class HostPin;
  struct Name {
    uint64_t hash;
    int32_t group;
    bool operator==(const Name&) const = default;
  };
  struct NameHash {
    size_t operator()(const Name& name) const {
      return static_cast<size_t>(name.hash) + static_cast<size_t>(name.group);
    }
  };
  struct Entry {
    BlockRef block;
    HostKey key;
    uint64_t last_use = 0;
    int32_t num_pins = 0;
    int32_t num_children = 0;  // entries of group 0 right behind this one
  };

  BlockSource& source(int32_t group);
  int32_t num_taken() const;
  HostId EntryFor(int32_t group, BlockId block) const {
    return HostId(first_entry_[static_cast<size_t>(group)] + block.value());
  }
  HostId ParentOf(const HostKey& key) const;
  void OfferToEvict(HostId entry);
  void Unpin(HostId entry);
  BlockRef Remove(HostId entry);
  Entry& at(HostId entry) { return entries_[entry.index()]; }
  const Entry& at(HostId entry) const { return entries_[entry.index()]; }

  BlockPool parents_;                                   // keeps number 0 for itself
  std::vector<std::unique_ptr<GroupPool>> split_;       // by group; none for one of whole parents
  std::vector<int32_t> first_entry_;                    // by group
  std::vector<Entry> entries_;                          // by group, then block
  std::unordered_map<Name, HostId, NameHash> by_hash_;  // never iterated
  EvictOrder<HostId> evict_order_;
  KvEventLog events_;
  uint64_t clock_ = 0;
};

}  // namespace tokenspeed
