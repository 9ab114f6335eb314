// SPDX-License-Identifier: MIT
//
// The device KV storage as one thing: pool, slots, block tables, prefix index. It moves requests in
// (slot + shared prefix + private blocks, all or nothing), grows them, publishes what settled, and
// moves them out. Every acquisition is two-phase: handles are collected first; a shortage drops
// them and changes nothing but which idle blocks are cached. Called by the scheduler on its thread;
// knows tokens, not requests.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cc/cache/block_pool.h"
#include "cc/cache/block_tables.h"
#include "cc/cache/prefix_index.h"
#include "cc/cache/residence.h"
#include "cc/cache/slot_pool.h"

namespace tokenspeed {

struct KvCacheConfig {
  int32_t num_blocks;
  int32_t block_size;
  int32_t num_slots;
  int32_t max_blocks_per_seq;
  bool enable_prefix_caching;
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

struct MovedIn {
  Residence residence;
  int32_t num_cached_tokens;
  // Set when the first private block starts as a copy of `copy_source`, which must stay until the
  // copy ran.
  PathPin copy_source;
  BlockId copy_from;
  BlockId copy_to;
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

  // A slot, the hit's path, and private blocks so that `num_tokens` fit. Nullopt when a slot or
  // `num_spare_blocks` more than needed are not to be had.
  std::optional<MovedIn> MoveIn(const PrefixHit& hit, const Identity& identity, int32_t num_tokens,
                                int32_t num_spare_blocks);
  // Makes room for `num_tokens` in all. False, and nothing changed, when blocks run out.
  bool Grow(Residence& residence, int32_t num_tokens);
  // Publishes the full blocks among the first `num_settled` tokens.
  void Publish(Residence& residence, const Content& content, int32_t num_settled);
  // Publishes full blocks and the partial tail, then returns everything.
  void MoveOut(Residence residence, const Content& content, int32_t num_settled);
  // The request's content no longer matches any identity (weights changed under it): keep it
  // private.
  void StopPublishing(Residence& residence) { residence.publishes_ = false; }

  int32_t num_available() const { return pool_.num_free() + index_.num_idle(); }
  const BlockPool& pool() const { return pool_; }
  const SlotPool& slots() const { return slots_; }
  BlockTables& tables() { return tables_; }
  const BlockTables& tables() const { return tables_; }
  PrefixIndex& index() { return index_; }
  const PrefixIndex& index() const { return index_; }
  int32_t block_size() const { return config_.block_size; }

 private:
  std::optional<std::vector<BlockRef>> Reserve(int32_t num_blocks);
  void Append(Residence& residence, BlockRef block);
  void AdoptPath(Residence& residence, const PrefixCursor& path);

  KvCacheConfig config_;
  BlockPool pool_;  // outlives every holder of its blocks, so it comes first
  SlotPool slots_;
  BlockTables tables_;
  PrefixIndex index_;
};

}  // namespace tokenspeed
