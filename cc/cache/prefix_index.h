// SPDX-License-Identifier: MIT
//
// The prefix cache: a forest of published blocks. A node is a block; a full block hangs under the
// block before it, found by chained hash and proven by its tokens; a partial tail is a leaf with
// fewer tokens, found by comparing. The index owns its blocks. Requests hold a `PathPin` on the
// deepest block they use, which keeps the whole path: an inner node is never a leaf, and only idle
// leaves are evicted, by last use, so a parent is never stranded. Whoever publishes promises that
// the step that wrote the block has settled. Costs: find O(tokens of a block), pin and unpin O(1)
// amortised, evict O(log n). Scheduler's thread only.

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/ids.h"
#include "cc/cache/block_pool.h"
#include "cc/cache/evict_order.h"
#include "cc/cache/identity.h"
#include "cc/cache/kv_events.h"

namespace tokenspeed {

class PrefixIndex;

// Keeps a node and all its ancestors in the index. An empty pin stands for the root.
class PathPin {
 public:
  PathPin() = default;
  PathPin(PathPin&& other) noexcept
      : index_(std::exchange(other.index_, nullptr)),
        node_(std::exchange(other.node_, BlockId())) {}
  PathPin& operator=(PathPin&& other) noexcept {
    std::swap(index_, other.index_);
    std::swap(node_, other.node_);
    return *this;
  }
  PathPin(const PathPin&) = delete;
  PathPin& operator=(const PathPin&) = delete;
  ~PathPin();

  BlockId node() const { return node_; }

 private:
  friend class PrefixIndex;
  PathPin(PrefixIndex* index, BlockId node) : index_(index), node_(node) {}
  PrefixIndex* index_ = nullptr;
  BlockId node_;
};

// A remembered position in the forest; stale when its block has left the index since.
struct PrefixCursor {
  BlockId node;  // invalid: at the root
  uint32_t generation = 0;
  int32_t num_blocks = 0;
};

struct TailHit {
  BlockId node;
  int32_t num_tokens = 0;
};

class PrefixIndex {
 public:
  PrefixIndex(int32_t num_blocks, int32_t block_size);
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // The full child of `parent` that holds exactly `tokens`; invalid when there is none.
  BlockId FindChild(BlockId parent, const Identity& identity, uint64_t hash,
                    std::span<const int32_t> tokens) const;
  // The child of `parent` that shares the longest run of leading tokens, among those of which
  // usable(child, run) is true. Looks at the newest few children.
  template <class Usable>
  TailHit FindTail(BlockId parent, const Identity& identity, std::span<const int32_t> tokens,
                   Usable usable) const;

  BlockId ParentOf(BlockId node) const { return nodes_[node.index()].parent; }
  PrefixCursor CursorAt(BlockId node, int32_t num_blocks) const;
  bool IsFresh(const PrefixCursor& cursor) const;
  // Changes whenever a block enters or leaves: a search that failed need not be repeated before
  // that.
  uint64_t epoch() const { return epoch_; }

  PathPin Pin(BlockId node);

  // Hands a full block over as the child of `tip` and moves `tip` onto it. When an equal block is
  // already there, `tip` moves onto that one, `block` stays with the caller, and the answer is
  // false.
  bool Publish(PathPin& tip, const Identity& identity, BlockRef& block, uint64_t hash,
               std::span<const int32_t> tokens);
  // Keeps a partly filled block as a leaf under `parent` and returns its node. An equal one that is
  // there already is returned instead; with `may_be_covered`, nothing is kept or returned when some
  // child starts with these tokens.
  BlockId PublishTail(BlockId parent, const Identity& identity, BlockRef block,
                      std::span<const int32_t> tokens, bool may_be_covered);

  // What a full block stands for, for a copy of it elsewhere.
  struct Description {
    const Identity& identity;
    uint64_t hash;
    uint64_t parent_hash;
    std::span<const int32_t> tokens;
  };
  Description Describe(BlockId node) const;
  // From now on remembers every full block that is published, for TakeStored().
  void RecordStored() { records_stored_ = true; }
  std::vector<PrefixCursor> TakeStored() { return std::exchange(stored_, {}); }
  int32_t num_tokens(BlockId node) const { return at(node).num_tokens; }
  bool IsFull(BlockId node) const { return at(node).num_tokens == block_size_; }

  // Takes the least recently used idle leaf out. Empty when every block is in use.
  BlockRef EvictOldest();
  // Empties the index. Only allowed when nothing is pinned.
  void Clear();

  int32_t num_cached() const { return num_cached_; }
  // Blocks that eviction could take, leaves first: those with no pin at or under them.
  int32_t num_idle() const { return num_cached_ - num_active_; }
  bool Contains(BlockId block) const { return nodes_[block.index()].num_tokens > 0; }
  KvEventLog& events() { return events_; }

  // Recomputes counts and links from the nodes; throws InvariantViolation on a difference.
  void Check() const;

 private:
  friend class PathPin;
  struct Node {
    BlockRef block;
    Identity identity{};  // compared where the parent is the root
    uint64_t hash = 0;
    uint64_t last_use = 0;
    BlockId parent;
    BlockId first_child;
    BlockId next_sibling;
    BlockId prev_sibling;
    BlockId next_in_bucket;
    int32_t num_tokens = 0;  // 0: not in the index
    int32_t num_refs = 0;    // pins on this node, plus children that have refs
    uint32_t generation = 0;
  };

  Node& at(BlockId id) { return nodes_[id.index()]; }
  const Node& at(BlockId id) const { return nodes_[id.index()]; }
  // How many of a node's newest children are compared for a partial hit: enough for the branches of
  // a few sessions, and a bound where thousands of prompts share one system prompt.
  static constexpr int kMaxTailCandidates = 8;

  std::span<const int32_t> TokensOf(BlockId id) const;
  // Leading tokens of node `id` that `tokens` starts with.
  int32_t CommonPrefix(BlockId id, std::span<const int32_t> tokens) const;
  BlockId FirstChild(BlockId parent, const Identity& identity) const;
  BlockId& Bucket(uint64_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
  void Insert(BlockId parent, const Identity& identity, BlockRef block, uint64_t hash,
              std::span<const int32_t> tokens);
  BlockRef Remove(BlockId id);
  void LinkChild(BlockId parent, BlockId child);
  void UnlinkChild(BlockId child);
  void AddRef(BlockId id);
  void DropRef(BlockId id);
  void OfferToEvict(BlockId id);

  int32_t block_size_;
  std::vector<Node> nodes_;      // by block number
  std::vector<int32_t> tokens_;  // [num_blocks, block_size]
  std::vector<BlockId> buckets_;
  std::map<Identity, BlockId> first_of_root_;
  EvictOrder<BlockId> evict_order_;
  KvEventLog events_;
  std::vector<PrefixCursor> stored_;
  bool records_stored_ = false;
  uint64_t clock_ = 0;
  uint64_t epoch_ = 0;
  int32_t num_cached_ = 0;
  int32_t num_active_ = 0;
};

template <class Usable>
TailHit PrefixIndex::FindTail(BlockId parent, const Identity& identity,
                              std::span<const int32_t> tokens, Usable usable) const {
  TailHit best;
  BlockId id = FirstChild(parent, identity);
  for (int seen = 0; id.valid() && seen < kMaxTailCandidates; ++seen, id = at(id).next_sibling) {
    const int32_t common = CommonPrefix(id, tokens);
    if (common > best.num_tokens && usable(id, common)) best = {id, common};
  }
  return best;
}

}  // namespace tokenspeed
