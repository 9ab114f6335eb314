// SPDX-License-Identifier: MIT
//
// The device KV storage as one thing: pool, slots, block tables, prefix index. It moves requests in
// (slot + shared prefix + private blocks, all or nothing), grows them, publishes what settled, and
// moves them out. Every acquisition is two-phase: handles are collected first; a shortage drops
// them and changes nothing but which idle blocks are cached. Called by the scheduler on its thread;
// knows tokens, not requests.

#pragma once

#include <cstdint>
#include <functional>
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
  int32_t num_state_columns;       // working states a request has in each kState group
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

// Where a request begins: what is on the device, and the tokens that its first row will find. Those
// beyond the hit are brought by a transfer, into the request's own blocks.
struct Start {
  PrefixHit hit;
  int32_t num_tokens;
};

// A block of a request: `column` is its place in the sequence, 0 for a state.
struct BlockPlace {
  int32_t group;
  int32_t column;
  BlockId block;
};

// A block that entered the cache: a node of the index, and the block of `group` that it has.
struct StoredBlock {
  PrefixCursor node;
  int32_t group;
};

class KvCache {
 public:
  explicit KvCache(const KvCacheConfig& config);

  // Walks on from `from` (or from the root when stale) over full blocks of content.tokens[0,
  // limit).
  PrefixCursor Extend(PrefixCursor from, const Identity& identity, const Content& content,
                      int32_t num_tokens_limit) const;
  // The tokens behind `path` that some block under it starts with, and from which every group can
  // continue: a window has the blocks it still reads, a state was saved exactly there.
  TailHit FindTail(const PrefixCursor& path, const Identity& identity, const Content& content,
                   int32_t num_tokens_limit) const;

  // The most blocks, up to `limit`, from which every group can continue: full history has every
  // block, a window has the blocks it still reads, a state was saved exactly there. A block that
  // the device lacks counts where elsewhere(group, column) says that another tier has it; blocks of
  // group 0 behind `path` are taken for granted.
  using Elsewhere = std::function<bool(int32_t group, int32_t column)>;
  int32_t Joint(const PrefixCursor& path, int32_t limit, const Elsewhere& elsewhere) const;
  // The first `num_blocks` of `path`.
  PrefixCursor Prefix(const PrefixCursor& path, int32_t num_blocks) const;

  // A slot, the path of what is on the device, and private blocks so that `num_tokens` fit. Nullopt
  // when a slot or `num_spare_blocks` more than needed are not to be had.
  std::optional<Residence> MoveIn(const Start& start, const Identity& identity, int32_t num_tokens,
                                  int32_t num_spare_blocks);
  // The copies that have to run before the first row. Asked for once, by the step with that row.
  StartCopies TakeStartCopies(Residence& residence) {
    return std::exchange(residence.start_copies_, StartCopies());
  }
  // The request's own blocks that a transfer has to fill before its first row.
  std::vector<BlockPlace> Incoming(const Residence& residence, const Start& start) const;
  // The blocks from which a request with `num_tokens` in the cache goes on, wherever that is.
  std::vector<BlockPlace> Needed(const Residence& residence, int32_t num_tokens) const;
  // Makes room for `num_tokens` in all. False, and nothing changed, when blocks run out.
  bool Grow(Residence& residence, int32_t num_tokens);
  // A block to save the state of group `group` in as it is at `mark`, a multiple of its checkpoint:
  // the copy to run behind the step. Nullopt when none is free: that costs hits and nothing else.
  std::optional<GroupCopy> SaveState(Residence& residence, int32_t group, StateMark mark);
  // Forgets states saved behind tokens that turned out not to be the request's.
  void DropStatesBehind(Residence& residence, int32_t num_settled);
  // Lets blocks go that no row at or behind `num_settled` reads any more.
  void ReleaseBehindWindow(Residence& residence, int32_t num_settled);
  // Publishes the full blocks among the first `num_settled` tokens.
  void Publish(Residence& residence, const Content& content, int32_t num_settled);
  // Gives blocks of windows that came with a transfer to the nodes that lack them.
  void ShareSides(Residence& residence, int32_t num_settled);
  // Publishes full blocks and the partial tail, then returns everything. `state` tells where the
  // working state stands; it is kept when that is exactly behind the last token.
  void MoveOut(Residence residence, const Content& content, int32_t num_settled, StateMark state);
  // The request's content no longer matches any identity (weights changed under it): keep it
  // private.
  void StopPublishing(Residence& residence) { residence.publishes_ = false; }

  // Forgets every cached prefix. Only when nothing is pinned.
  void Clear();

  // From now on remembers what enters the cache, for TakeStored().
  void RecordStored();
  std::vector<StoredBlock> TakeStored();
  // The block of group `g` that a node has; invalid when it has none.
  BlockId BlockOf(BlockId node, int32_t g) const;
  SidePin PinSide(BlockId node, int32_t g) { return sides_[static_cast<size_t>(g) - 1]->Pin(node); }

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
  void AdoptWindow(Residence& residence, int32_t group, const Start& start,
                   const std::vector<BlockId>& path);
  void AdoptSides(Residence& residence, const Start& start, const std::vector<BlockId>& path);
  bool FillWindow(Residence& residence, int32_t group, const Start& start);
  bool FillStates(Residence& residence, int32_t group, const Start& start);
  BlockId StateSource(int32_t group, const Start& start) const;
  bool TailSuits(BlockId node, int32_t num_tokens, int32_t start,
                 const std::vector<BlockId>& path) const;
  bool WindowReaches(int32_t group, int32_t num_tokens, const std::vector<BlockId>& path) const;
  bool HasStateGroup() const;
  void PublishSides(Residence& residence, int32_t column);
  void PublishTail(Residence& residence, const Content& content, int32_t num_settled,
                   StateMark state);
  void AttachStates(Residence& residence, BlockId node, int32_t column);
  void Attach(int32_t group, BlockId node, BlockRef block);

  KvCacheConfig config_;
  BlockPool parents_;  // outlives every holder of its blocks, so it comes first
  std::vector<std::unique_ptr<GroupPool>>
      split_;  // by group; none when there is one group of whole parents
  SlotPool slots_;
  std::vector<BlockTables> tables_;
  PrefixIndex index_;
  std::vector<std::unique_ptr<SideCache>> sides_;  // by group, from group 1 on
  std::vector<StoredBlock> stored_;
  bool records_stored_ = false;
};

}  // namespace tokenspeed
