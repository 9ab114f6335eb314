// SPDX-License-Identifier: MIT

#include "cc/cache/prefix_index.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cc/base/status.h"

namespace tokenspeed {

PathPin::~PathPin() {
  if (index_ != nullptr) index_->DropRef(node_);
}

PrefixIndex::PrefixIndex(int32_t num_blocks, int32_t block_size)
    : block_size_(block_size),
      nodes_(static_cast<size_t>(num_blocks)),
      tokens_(static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size)),
      buckets_(std::bit_ceil(static_cast<size_t>(num_blocks))),
      evict_order_(num_blocks) {}

std::span<const int32_t> PrefixIndex::TokensOf(BlockId id) const {
  const auto stride = static_cast<size_t>(block_size_);
  return std::span(tokens_).subspan(id.index() * stride, static_cast<size_t>(at(id).num_tokens));
}

BlockId PrefixIndex::FirstChild(BlockId parent, const Identity& identity) const {
  if (parent.valid()) return at(parent).first_child;
  const auto root = first_of_root_.find(identity);
  return root == first_of_root_.end() ? BlockId() : root->second;
}

BlockId PrefixIndex::FindChild(BlockId parent, const Identity& identity, uint64_t hash,
                               std::span<const int32_t> tokens) const {
  for (BlockId id = buckets_[hash & (buckets_.size() - 1)]; id.valid();
       id = at(id).next_in_bucket) {
    const Node& node = at(id);
    if (node.hash != hash || node.parent != parent) continue;
    if (!parent.valid() && node.identity != identity) continue;
    if (std::ranges::equal(TokensOf(id), tokens)) return id;
  }
  return {};
}

int32_t PrefixIndex::CommonPrefix(BlockId id, std::span<const int32_t> tokens) const {
  const std::span<const int32_t> mine = TokensOf(id);
  const size_t limit = std::min(mine.size(), tokens.size());
  const auto end = mine.begin() + static_cast<std::ptrdiff_t>(limit);
  return static_cast<int32_t>(std::mismatch(mine.begin(), end, tokens.begin()).first -
                              mine.begin());
}

PrefixCursor PrefixIndex::CursorAt(BlockId node, int32_t num_blocks) const {
  return {node, node.valid() ? at(node).generation : 0, num_blocks};
}

bool PrefixIndex::IsFresh(const PrefixCursor& cursor) const {
  if (!cursor.node.valid()) return true;
  return Contains(cursor.node) && at(cursor.node).generation == cursor.generation;
}

PathPin PrefixIndex::Pin(BlockId node) {
  if (!node.valid()) return {};
  AddRef(node);
  return PathPin(this, node);
}

bool PrefixIndex::Publish(PathPin& tip, const Identity& identity, BlockRef& block, uint64_t hash,
                          std::span<const int32_t> tokens) {
  const BlockId parent = tip.node();
  BlockId child = FindChild(parent, identity, hash, tokens);
  const bool stored = !child.valid();
  if (stored) {
    child = block.id();
    Insert(parent, identity, std::move(block), hash, tokens);
  }
  PathPin moved = Pin(child);  // before the old tip lets go, so that the path never looks idle
  tip = std::move(moved);
  return stored;
}

BlockId PrefixIndex::PublishTail(BlockId parent, const Identity& identity, BlockRef block,
                                 std::span<const int32_t> tokens, bool may_be_covered) {
  const auto length = static_cast<int32_t>(tokens.size());
  const auto equals = [&](BlockId id, int32_t) { return at(id).num_tokens == length; };
  const TailHit equal = FindTail(parent, identity, tokens, equals);
  if (equal.num_tokens == length) return equal.node;
  const auto any = [](BlockId, int32_t) { return true; };
  if (may_be_covered && FindTail(parent, identity, tokens, any).num_tokens == length) return {};
  const BlockId id = block.id();
  Insert(parent, identity, std::move(block), 0, tokens);
  at(id).last_use = ++clock_;
  OfferToEvict(id);
  return id;
}

void PrefixIndex::Insert(BlockId parent, const Identity& identity, BlockRef block, uint64_t hash,
                         std::span<const int32_t> tokens) {
  const BlockId id = block.id();
  Node& node = at(id);
  tokenspeed::Check(node.num_tokens == 0, "a block is published once");
  node.block = std::move(block);
  node.identity = identity;
  node.hash = hash;
  node.parent = parent;
  node.num_tokens = static_cast<int32_t>(tokens.size());
  std::ranges::copy(tokens,
                    tokens_.begin() + static_cast<std::ptrdiff_t>(id.index()) * block_size_);
  LinkChild(parent, id);
  ++num_cached_;
  ++epoch_;
  if (node.num_tokens < block_size_) return;
  node.next_in_bucket = std::exchange(Bucket(hash), id);
  if (records_stored_) stored_.push_back(CursorAt(id, 0));
  if (!events_.enabled()) return;
  const uint64_t parent_hash = parent.valid() ? at(parent).hash : identity.RootHash();
  events_.Add(BlockStored{
      Medium::kDevice, hash, parent_hash, parent.valid(), {tokens.begin(), tokens.end()}});
}

PrefixIndex::Description PrefixIndex::Describe(BlockId id) const {
  const Node& node = at(id);
  const uint64_t parent_hash =
      node.parent.valid() ? at(node.parent).hash : node.identity.RootHash();
  return {node.identity, node.hash, parent_hash, TokensOf(id)};
}

void PrefixIndex::LinkChild(BlockId parent, BlockId child) {
  BlockId& first = parent.valid() ? at(parent).first_child : first_of_root_[at(child).identity];
  at(child).next_sibling = first;
  if (first.valid()) at(first).prev_sibling = child;
  first = child;
  if (parent.valid() && evict_order_.Contains(parent)) evict_order_.Remove(parent);
}

void PrefixIndex::UnlinkChild(BlockId child) {
  Node& node = at(child);
  if (node.next_sibling.valid()) at(node.next_sibling).prev_sibling = node.prev_sibling;
  if (node.prev_sibling.valid()) {
    at(node.prev_sibling).next_sibling = node.next_sibling;
  } else if (node.parent.valid()) {
    at(node.parent).first_child = node.next_sibling;
  } else if (node.next_sibling.valid()) {
    first_of_root_[node.identity] = node.next_sibling;
  } else {
    first_of_root_.erase(node.identity);
  }
}

void PrefixIndex::AddRef(BlockId id) {
  // Refs count active children too, so the walk stops at the first ancestor that was in use
  // already.
  for (; id.valid(); id = at(id).parent) {
    if (evict_order_.Contains(id)) evict_order_.Remove(id);
    if (at(id).num_refs++ > 0) return;
    ++num_active_;
  }
}

void PrefixIndex::DropRef(BlockId id) {
  at(id).last_use = ++clock_;
  for (; id.valid(); id = at(id).parent) {
    if (--at(id).num_refs > 0) return;
    --num_active_;
    OfferToEvict(id);
  }
}

void PrefixIndex::OfferToEvict(BlockId id) {
  const Node& node = at(id);
  if (node.num_refs == 0 && !node.first_child.valid()) evict_order_.Add(id, node.last_use);
}

BlockRef PrefixIndex::EvictOldest() {
  if (evict_order_.empty()) return {};
  const BlockId id = evict_order_.Oldest();
  evict_order_.Remove(id);
  return Remove(id);
}

BlockRef PrefixIndex::Remove(BlockId id) {
  Node& node = at(id);
  UnlinkChild(id);
  if (node.num_tokens == block_size_) {
    BlockId* link = &Bucket(node.hash);
    while (*link != id) link = &at(*link).next_in_bucket;
    *link = node.next_in_bucket;
    events_.Add(BlockRemoved{Medium::kDevice, node.hash});
  }
  if (node.parent.valid()) {
    // A use of a child was a use of its parent; it is carried up when the child goes, so no walk is
    // needed.
    at(node.parent).last_use = std::max(at(node.parent).last_use, node.last_use);
    OfferToEvict(node.parent);
  }
  BlockRef block = std::move(node.block);
  const uint32_t generation = node.generation + 1;
  node = Node();
  node.generation = generation;
  --num_cached_;
  ++epoch_;
  return block;
}

void PrefixIndex::Clear() {
  tokenspeed::Check(num_active_ == 0, "the prefix index is cleared only when nothing is pinned");
  const bool told = std::exchange(events_, KvEventLog()).enabled();
  while (EvictOldest()) {
  }
  tokenspeed::Check(num_cached_ == 0, "every idle block can be evicted, leaves first");
  if (!told) return;
  events_.Enable();
  events_.Add(KvEvent(std::in_place_type<AllBlocksCleared>));
}

void PrefixIndex::Check() const {
  int32_t cached = 0;
  int32_t active = 0;
  std::vector<int32_t> active_children(nodes_.size(), 0);
  for (const Node& node : nodes_) {
    if (node.num_tokens == 0) continue;
    ++cached;
    if (node.num_refs > 0) ++active;
    if (node.parent.valid() && node.num_refs > 0) ++active_children[node.parent.index()];
  }
  tokenspeed::Check(cached == num_cached_, "cached blocks are counted right");
  tokenspeed::Check(active == num_active_, "blocks in use are counted right");
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    const BlockId id(static_cast<int32_t>(i));
    if (node.num_tokens == 0) {
      tokenspeed::Check(!evict_order_.Contains(id), "only cached blocks wait for eviction");
      continue;
    }
    tokenspeed::Check(node.block.id() == id, "a cached block is owned by the index");
    tokenspeed::Check(!node.parent.valid() || Contains(node.parent), "no block is stranded");
    tokenspeed::Check(node.num_refs >= active_children[i],
                      "a child in use keeps its parent in use");
    const bool idle_leaf = node.num_refs == 0 && !node.first_child.valid();
    tokenspeed::Check(evict_order_.Contains(id) == idle_leaf,
                      "exactly the idle leaves wait for eviction");
  }
}

}  // namespace tokenspeed
