// SPDX-License-Identifier: MIT
//
// The second tier: copies of full device blocks in pinned host memory, so that what the device
// evicts can come back without being computed. Here are only numbers: which host block holds the
// content of which chained hash. Every copy is two-phase: `Reserve` takes host blocks (evicting
// what was used longest ago), the copy runs, then `Commit` makes an entry or the reservation dies
// and is free again. `HostPin` keeps an entry while it is read. A full tier costs hits, never
// correctness. Scheduler's thread only.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/base/ids.h"
#include "cc/cache/block_pool.h"
#include "cc/cache/evict_order.h"
#include "cc/cache/identity.h"
#include "cc/cache/kv_events.h"

namespace tokenspeed {

class HostTier;

// Keeps one entry from eviction. Move-only.
class HostPin {
 public:
  HostPin() = default;
  HostPin(HostPin&& other) noexcept
      : tier_(std::exchange(other.tier_, nullptr)),
        block_(std::exchange(other.block_, BlockId())) {}
  HostPin& operator=(HostPin&& other) noexcept {
    std::swap(tier_, other.tier_);
    std::swap(block_, other.block_);
    return *this;
  }
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;
  ~HostPin();
  BlockId block() const { return block_; }

 private:
  friend class HostTier;
  HostPin(HostTier* tier, BlockId block) : tier_(tier), block_(block) {}
  HostTier* tier_ = nullptr;
  BlockId block_;
};

// What an entry stands for: one full block of tokens behind a chain.
struct HostKey {
  Identity identity;
  uint64_t hash;
  uint64_t parent_hash;
  std::vector<int32_t> tokens;
};

class HostTier {
 public:
  // Host blocks are numbered from 1 to `num_blocks`. Zero of them: the tier is off, every search
  // misses.
  explicit HostTier(int32_t num_blocks);
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  bool enabled() const { return num_blocks_ > 0; }
  // The entry that holds exactly `tokens` behind `parent_hash`; invalid when there is none.
  BlockId Find(const Identity& identity, uint64_t hash, uint64_t parent_hash,
               std::span<const int32_t> tokens) const;
  bool Contains(uint64_t hash) const { return by_hash_.contains(hash); }

  // A host block to copy into; empty when every one is pinned or being written.
  BlockRef Reserve();
  // The copy into `block` is done: it becomes the entry for `key`, unless one came first.
  void Commit(BlockRef block, HostKey key);
  HostPin Pin(BlockId block);
  // Forgets an entry whose content turned out unreadable, unless another reader still has it.
  void DropIfIdle(BlockId block);
  // Forgets every entry that is not pinned; the caller tells that all is cleared.
  void Clear();
  KvEventLog& events() { return events_; }

  int32_t num_total() const { return num_blocks_; }
  // Blocks being copied into: neither free nor an entry.
  int32_t num_reserved() const { return num_blocks_ - num_free() - num_entries(); }
  int32_t num_free() const { return pool_.num_free(); }
  int32_t num_entries() const { return static_cast<int32_t>(by_hash_.size()); }
  void Check() const;

 private:
  friend class HostPin;
  struct Entry {
    BlockRef block;
    HostKey key;
    uint64_t last_use = 0;
    int32_t num_pins = 0;
  };
  void Unpin(BlockId block);
  BlockRef Remove(BlockId block);
  Entry& at(BlockId block) { return entries_[block.index()]; }

  int32_t num_blocks_;
  BlockPool pool_;  // keeps number 0 for itself
  std::vector<Entry> entries_;
  std::unordered_map<uint64_t, BlockId> by_hash_;
  EvictOrder evict_order_;
  KvEventLog events_;
  uint64_t clock_ = 0;
};

}  // namespace tokenspeed
