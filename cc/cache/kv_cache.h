// SPDX-License-Identifier: MIT
//
// The device KV storage as one thing: pool, slots, block tables, prefix index. It moves requests in
// (slot + shared prefix + private blocks, all or nothing), grows them, publishes what settled, and
// moves them out. Every acquisition is two-phase: handles are collected first; a shortage drops
// them and changes nothing but which idle blocks are cached. Called by the scheduler on its thread;
// knows tokens, not requests.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cc/cache/block_pool.h"
#include "cc/cache/block_tables.h"
#include "cc/cache/group.h"
#include "cc/cache/prefix_index.h"
#include "cc/cache/residence.h"
#include "cc/cache/side_cache.h"
#include "cc/cache/slot_pool.h"

namespace tokenspeed {

struct KvCacheConfig {
  int32_t num_blocks;
  int32_t block_size;
  int32_t num_slots;
  int32_t max_blocks_per_seq;
  bool enable_prefix_caching;
  std::vector<CacheGroup> groups;  // the first one is kFull
};

// A sequence as the cache sees it: all known tokens, and the chained hashes of its full blocks.
struct Content {
  std::span<const int32_t> tokens;
  std::span<const uint64_t> hashes;
};

// The longest usable prefix of a sequence: whole blocks up to `path`, then `tail` tokens by copy.
struct PrefixHit {
  PrefixCursor path;
  TailHit tail;
};

// A block of `group` whose content is to be copied into another one.
struct GroupCopy {
  int32_t group;
  BlockId from;
  BlockId to;
};

struct MovedIn {
  Residence residence;
  int32_t num_cached_tokens;
  // Copies to run before the first row, and what keeps their sources until they ran.
  std::vector<GroupCopy> copies;
  PathPin copy_source;
  std::vector<SidePin> side_sources;
};

class KvCache {
 public:
  explicit KvCache(const KvCacheConfig& config);

  // Walks on from `from` (or from the root when stale) over full blocks of content.tokens[0,
  // limit).
  PrefixCursor Extend(PrefixCursor from, const Identity& identity, const Content& content,
                      int32_t num_tokens_limit) const;
  // The tokens behind `path` that some block under it starts with.
  TailHit FindTail(const PrefixCursor& path, const Identity& identity, const Content& content,
                   int32_t num_tokens_limit) const;

  // The longest part of `path` that every group can continue from: full history has every block, a
  // window has the blocks it still reads, a state was saved exactly there.
  PrefixCursor Joint(const PrefixCursor& path) const;

  // A slot, the hit's path, and private blocks so that `num_tokens` fit. Nullopt when a slot or
  // `num_spare_blocks` more than needed are not to be had.
  std::optional<MovedIn> MoveIn(const PrefixHit& hit, const Identity& identity, int32_t num_tokens,
                                int32_t num_spare_blocks);
  // Makes room for `num_tokens` in all. False, and nothing changed, when blocks run out.
  bool Grow(Residence& residence, int32_t num_tokens);
  // A block to save the state of group `group` in as it is after `num_tokens`, a multiple of its
  // checkpoint: the copy to run behind the step. Nullopt when none is free: that costs hits and
  // nothing else.
  std::optional<GroupCopy> SaveState(Residence& residence, int32_t group, int32_t num_tokens);
  // Lets blocks go that no row at or behind `num_settled` reads any more.
  void ReleaseBehindWindow(Residence& residence, int32_t num_settled);
  // Publishes the full blocks among the first `num_settled` tokens.
  void Publish(Residence& residence, const Content& content, int32_t num_settled);
  // Publishes full blocks and the partial tail, then returns everything.
  void MoveOut(Residence residence, const Content& content, int32_t num_settled);
  // The request's content no longer matches any identity (weights changed under it): keep it
  // private.
  void StopPublishing(Residence& residence) { residence.publishes_ = false; }

  // Forgets every cached prefix. Only when nothing is pinned.
  void Clear();

  // Throws InvariantViolation where counts or links of the index and the groups disagree.
  void Check() const;

  int32_t num_groups() const { return static_cast<int32_t>(config_.groups.size()); }
  const CacheGroup& group(int32_t g) const { return config_.groups[static_cast<size_t>(g)]; }
  // Blocks of group 0 to be had at best; exact when there is no other group.
  int32_t num_available() const { return pool().num_free() + index_.num_idle(); }
  // Blocks of group 0 in use; what other groups use of the same memory is counted in its blocks,
  // rounded up.
  int32_t num_active() const;
  const BlockPool& parents() const { return parents_; }
  const BlockSource& pool(int32_t g = 0) const {
    return split_.empty() ? static_cast<const BlockSource&>(parents_)
                          : *split_[static_cast<size_t>(g)];
  }
  const GroupPool* split(int32_t g) const {
    return split_.empty() ? nullptr : split_[static_cast<size_t>(g)].get();
  }
  const SideCache& side(int32_t g) const { return *sides_[static_cast<size_t>(g) - 1]; }
  const SlotPool& slots() const { return slots_; }
  BlockTables& tables(int32_t g = 0) { return tables_[static_cast<size_t>(g)]; }
  const BlockTables& tables(int32_t g = 0) const { return tables_[static_cast<size_t>(g)]; }
  PrefixIndex& index() { return index_; }
  const PrefixIndex& index() const { return index_; }
  int32_t block_size() const { return config_.block_size; }

 private:
  BlockSource& source(int32_t g) {
    return split_.empty() ? static_cast<BlockSource&>(parents_) : *split_[static_cast<size_t>(g)];
  }
  BlockRef TakeOrEvict(int32_t group);
  bool EvictOne();
  // All or nothing, from group `group`.
  std::optional<std::vector<BlockRef>> Reserve(int32_t group, int32_t num_blocks);
  void Append(Residence& residence, BlockRef block);
  void AppendSide(Residence& residence, int32_t group, BlockRef block);
  std::vector<BlockId> PathOf(const PrefixCursor& path) const;
  void AdoptPath(Residence& residence, const std::vector<BlockId>& path);
  void AdoptSide(MovedIn& moved_in, int32_t group, const std::vector<BlockId>& path);
  bool TakeWorkingStates(MovedIn& moved_in, const std::vector<BlockId>& path);
  void PublishSides(Residence& residence, int32_t column);

  KvCacheConfig config_;
  BlockPool parents_;  // outlives every holder of its blocks, so it comes first
  std::vector<std::unique_ptr<GroupPool>>
      split_;  // by group; none when there is one group of whole parents
  SlotPool slots_;
  std::vector<BlockTables> tables_;
  PrefixIndex index_;
  std::vector<std::unique_ptr<SideCache>> sides_;  // by group, from group 1 on
};

}  // namespace tokenspeed
