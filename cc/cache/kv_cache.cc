// SPDX-License-Identifier: MIT

#include "cc/cache/kv_cache.h"

#include <algorithm>
#include <utility>

#include "cc/base/containers.h"
#include "cc/base/status.h"

namespace tokenspeed {
namespace {

int32_t NumNodes(const KvCacheConfig& config) {
  return config.num_blocks * config.groups[0].blocks_per_parent;
}

}  // namespace

KvCache::KvCache(const KvCacheConfig& config)
    : config_(config),
      parents_(config.num_blocks),
      slots_(config.num_slots),
      index_(NumNodes(config), config.block_size) {
  const bool whole_parents = config.groups.size() == 1 && config.groups[0].blocks_per_parent == 1;
  for (const CacheGroup& group : config.groups) {
    if (!whole_parents)
      split_.push_back(std::make_unique<GroupPool>(parents_, group.blocks_per_parent));
    const int32_t columns = group.kind == GroupKind::kState ? 1 : config.max_blocks_per_seq;
    tables_.emplace_back(config.num_slots, columns);
  }
  for (size_t g = 1; g < config.groups.size(); ++g) {
    sides_.push_back(std::make_unique<SideCache>(NumNodes(config)));
  }
}

PrefixCursor KvCache::Extend(PrefixCursor from, const Identity& identity, const Content& content,
                             int32_t num_tokens_limit) const {
  if (!config_.enable_prefix_caching) return {};
  if (!index_.IsFresh(from)) from = {};
  const auto block_size = static_cast<size_t>(config_.block_size);
  const int32_t limit = num_tokens_limit / config_.block_size;
  int32_t depth = from.num_blocks;
  BlockId node = from.node;
  while (depth < limit) {
    const auto i = static_cast<size_t>(depth);
    const BlockId child = index_.FindChild(node, identity, content.hashes[i],
                                           content.tokens.subspan(i * block_size, block_size));
    if (!child.valid()) break;
    node = child;
    ++depth;
  }
  return index_.CursorAt(node, depth);
}

TailHit KvCache::FindTail(const PrefixCursor& path, const Identity& identity,
                          const Content& content, int32_t num_tokens_limit) const {
  // A partial block is continued by copying it; with other groups they would all have to have it.
  if (!config_.enable_prefix_caching || num_groups() > 1) return {};
  const int32_t start = path.num_blocks * config_.block_size;
  const int32_t length = std::min(num_tokens_limit - start, config_.block_size);
  if (length <= 0) return {};
  return index_.FindTail(
      path.node, identity,
      content.tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(length)));
}

std::vector<BlockId> KvCache::PathOf(const PrefixCursor& path) const {
  std::vector<BlockId> nodes(static_cast<size_t>(path.num_blocks));
  BlockId node = path.node;
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it, node = index_.ParentOf(node)) *it = node;
  return nodes;
}

PrefixCursor KvCache::Joint(const PrefixCursor& path) const {
  if (num_groups() == 1) return path;
  const std::vector<BlockId> nodes = PathOf(path);
  // For each group and depth, the first column of the unbroken run of blocks that ends there.
  std::vector<std::vector<int32_t>> run_start(sides_.size());
  for (size_t side = 0; side < sides_.size(); ++side) {
    int32_t start = 0;
    run_start[side].push_back(0);
    for (int32_t i = 0; i < path.num_blocks; ++i) {
      if (!sides_[side]->Has(nodes[static_cast<size_t>(i)])) start = i + 1;
      run_start[side].push_back(start);
    }
  }
  const auto continues_at = [&](int32_t depth, size_t side) {
    const CacheGroup& group = config_.groups[side + 1];
    const auto at = static_cast<size_t>(depth);
    if (group.kind == GroupKind::kState) return sides_[side]->Has(nodes[at - 1]);
    const int32_t needed = group.FirstLiveBlock(depth * config_.block_size, config_.block_size);
    return run_start[side][at] <= needed;
  };
  for (int32_t depth = path.num_blocks; depth > 0; --depth) {
    bool all = true;
    for (size_t side = 0; side < sides_.size() && all; ++side) all = continues_at(depth, side);
    if (all) return index_.CursorAt(nodes[static_cast<size_t>(depth) - 1], depth);
  }
  return {};
}

bool KvCache::EvictOne() {
  // Side blocks first: losing one costs a boundary, losing a node costs its whole subtree's
  // boundaries.
  for (const auto& side : sides_) {
    if (side->num_attached() > index_.num_cached() / 2 && side->EvictOldest()) return true;
  }
  if (BlockRef evicted = index_.EvictOldest()) {
    for (const auto& side : sides_) (void)side->Drop(evicted.id());
    return true;
  }
  return std::ranges::any_of(sides_, [](const auto& side) { return bool{side->EvictOldest()}; });
}

BlockRef KvCache::TakeOrEvict(int32_t group) {
  BlockRef block = source(group).Take();
  if (split_.empty()) return block ? std::move(block) : index_.EvictOldest();
  while (!block && EvictOne()) block = source(group).Take();
  return block;
}

std::optional<std::vector<BlockRef>> KvCache::Reserve(int32_t group, int32_t num_blocks) {
  if (split_.empty() && num_blocks > num_available()) return std::nullopt;
  std::vector<BlockRef> blocks;
  blocks.reserve(static_cast<size_t>(std::max(num_blocks, 0)));
  while (num_blocks-- > 0) {
    blocks.push_back(TakeOrEvict(group));
    if (!blocks.back()) return std::nullopt;
  }
  return blocks;
}

void KvCache::Append(Residence& residence, BlockRef block) {
  tables().Set(residence.slot(), residence.num_blocks(), block.id());
  residence.columns_.push_back(std::move(block));
}

void KvCache::AppendSide(Residence& residence, int32_t group, BlockRef block) {
  SideColumns& side = residence.sides_[static_cast<size_t>(group) - 1];
  tables(group).Set(residence.slot(), static_cast<int32_t>(side.own.size()), block.id());
  side.own.push_back(std::move(block));
  side.shared.emplace_back();
}

void KvCache::AdoptPath(Residence& residence, const std::vector<BlockId>& path) {
  residence.num_published_ = static_cast<int32_t>(path.size());
  residence.columns_.resize(path.size());
  for (size_t column = 0; column < path.size(); ++column) {
    tables().Set(residence.slot(), static_cast<int32_t>(column), path[column]);
  }
}

void KvCache::AdoptSide(MovedIn& moved_in, int32_t g, const std::vector<BlockId>& path) {
  Residence& residence = moved_in.residence;
  SideColumns& side = residence.sides_.emplace_back();
  SideCache& cache = *sides_[static_cast<size_t>(g) - 1];
  if (group(g).kind == GroupKind::kState) {
    if (!path.empty()) moved_in.side_sources.push_back(cache.Pin(path.back()));
    return;
  }
  const auto depth = static_cast<int32_t>(path.size());
  side.num_released = group(g).FirstLiveBlock(depth * config_.block_size, config_.block_size);
  side.own.resize(path.size());
  side.shared.resize(path.size());
  for (int32_t column = side.num_released; column < depth; ++column) {
    const auto i = static_cast<size_t>(column);
    side.shared[i] = cache.Pin(path[i]);
    tables(g).Set(residence.slot(), column, cache.BlockOf(path[i]));
  }
}

bool KvCache::TakeWorkingStates(MovedIn& moved_in, const std::vector<BlockId>& path) {
  for (int32_t g = 1; g < num_groups(); ++g) {
    if (group(g).kind != GroupKind::kState) continue;
    BlockRef working = TakeOrEvict(g);
    if (!working) return false;
    if (!path.empty()) {
      moved_in.copies.push_back({g, side(g).BlockOf(path.back()), working.id()});
    }
    AppendSide(moved_in.residence, g, std::move(working));
  }
  return true;
}

std::optional<MovedIn> KvCache::MoveIn(const PrefixHit& hit, const Identity& identity,
                                       int32_t num_tokens, int32_t num_spare_blocks) {
  SlotRef slot = slots_.Take();
  if (!slot) return std::nullopt;
  // Pinned before blocks are reserved, so that the reservation cannot evict what it is meant to
  // extend.
  PathPin pin = index_.Pin(hit.path.node);
  PathPin copy_source = index_.Pin(hit.tail.node);
  const std::vector<BlockId> path = PathOf(hit.path);
  const int32_t cached = hit.path.num_blocks * config_.block_size + hit.tail.num_tokens;
  MovedIn moved_in{Residence(std::move(slot), std::move(pin), identity), cached, {}, {}, {}};
  Residence& residence = moved_in.residence;
  const int32_t num_new = CeilDiv(num_tokens, config_.block_size) - hit.path.num_blocks;
  for (int32_t g = 1; g < num_groups(); ++g) AdoptSide(moved_in, g, path);
  if (!TakeWorkingStates(moved_in, path)) return std::nullopt;
  if (split_.empty() && num_new + num_spare_blocks > num_available()) return std::nullopt;
  auto blocks = Reserve(0, split_.empty() ? num_new : num_new + num_spare_blocks);
  if (!blocks) return std::nullopt;
  blocks->resize(static_cast<size_t>(num_new));  // the spare ones only had to be there

  AdoptPath(residence, path);
  for (BlockRef& block : *blocks) Append(residence, std::move(block));
  if (hit.tail.node.valid()) {
    const auto first = static_cast<size_t>(hit.path.num_blocks);
    moved_in.copies.push_back({0, hit.tail.node, residence.columns_[first].id()});
    moved_in.copy_source = std::move(copy_source);
  }
  return moved_in;
}

bool KvCache::Grow(Residence& residence, int32_t num_tokens) {
  const int32_t num_columns = CeilDiv(num_tokens, config_.block_size);
  std::vector<std::vector<BlockRef>> reserved;
  for (int32_t g = 0; g < num_groups(); ++g) {
    int32_t num_new = num_columns - residence.num_blocks();
    if (g > 0) {
      const auto& side = residence.sides_[static_cast<size_t>(g) - 1];
      num_new = group(g).kind == GroupKind::kState
                    ? 0
                    : num_columns - static_cast<int32_t>(side.own.size());
    }
    if (num_new <= 0) {
      if (num_groups() == 1) return true;
      reserved.emplace_back();
      continue;
    }
    auto blocks = Reserve(g, num_new);
    if (!blocks) return false;
    reserved.push_back(std::move(*blocks));
  }
  for (BlockRef& block : reserved[0]) Append(residence, std::move(block));
  for (int32_t g = 1; g < num_groups(); ++g) {
    for (BlockRef& block : reserved[static_cast<size_t>(g)])
      AppendSide(residence, g, std::move(block));
  }
  return true;
}

std::optional<GroupCopy> KvCache::SaveState(Residence& residence, int32_t g, int32_t num_tokens) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return std::nullopt;
  BlockRef block = TakeOrEvict(g);
  if (!block) return std::nullopt;
  SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
  const GroupCopy copy{g, side.own[0].id(), block.id()};
  side.saved.push_back({num_tokens / config_.block_size, std::move(block)});
  return copy;
}

void KvCache::ReleaseBehindWindow(Residence& residence, int32_t num_settled) {
  for (int32_t g = 1; g < num_groups(); ++g) {
    SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
    const int32_t live = group(g).FirstLiveBlock(num_settled, config_.block_size);
    for (; side.num_released < live; ++side.num_released) {
      const auto i = static_cast<size_t>(side.num_released);
      side.own[i] = BlockRef();
      side.shared[i] = SidePin();
    }
  }
}

void KvCache::Publish(Residence& residence, const Content& content, int32_t num_settled) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return;
  const auto block_size = static_cast<size_t>(config_.block_size);
  const int32_t num_full = num_settled / config_.block_size;
  for (; residence.num_published_ < num_full; ++residence.num_published_) {
    const auto i = static_cast<size_t>(residence.num_published_);
    index_.Publish(residence.pin_, residence.identity_, residence.columns_[i], content.hashes[i],
                   content.tokens.subspan(i * block_size, block_size));
    if (num_groups() > 1) PublishSides(residence, residence.num_published_);
  }
}

void KvCache::PublishSides(Residence& residence, int32_t column) {
  const BlockId node = residence.tip();
  for (int32_t g = 1; g < num_groups(); ++g) {
    SideCache& cache = *sides_[static_cast<size_t>(g) - 1];
    SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
    if (group(g).kind == GroupKind::kState) {
      for (SavedState& state : side.saved) {
        if (state.num_blocks == column + 1 && !cache.Has(node))
          cache.Attach(node, std::move(state.block));
      }
      std::erase_if(side.saved, [&](const SavedState& s) { return s.num_blocks <= column + 1; });
      continue;
    }
    BlockRef& own = side.own[static_cast<size_t>(column)];
    if (!own || cache.Has(node)) continue;  // let go already, or an equal one is there
    cache.Attach(node, std::move(own));
    side.shared[static_cast<size_t>(column)] = cache.Pin(node);
  }
}

void KvCache::MoveOut(Residence residence, const Content& content, int32_t num_settled) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return;
  Publish(residence, content, num_settled);
  const int32_t start = residence.num_published_ * config_.block_size;
  if (num_settled <= start || num_groups() > 1) return;
  const auto tail =
      content.tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(num_settled - start));
  index_.PublishTail(residence.tip(), residence.identity_,
                     std::move(residence.columns_[static_cast<size_t>(residence.num_published_)]),
                     tail);
}

int32_t KvCache::num_active() const {
  if (split_.empty()) return parents_.num_total() - num_available();
  int32_t active = split_[0]->num_taken() - index_.num_idle();
  for (int32_t g = 1; g < num_groups(); ++g) {
    const int32_t in_use = split(g)->num_taken() - side(g).num_idle();
    active += CeilDiv(in_use * group(0).blocks_per_parent, group(g).blocks_per_parent);
  }
  return active;
}

void KvCache::Check() const {
  index_.Check();
  for (const auto& side : sides_) {
    int32_t attached = 0;
    for (int32_t node = 0; node < NumNodes(config_); ++node) {
      if (!side->Has(BlockId(node))) continue;
      ++attached;
      tokenspeed::Check(index_.Contains(BlockId(node)),
                        "a block of a group belongs to a node of the index");
    }
    tokenspeed::Check(attached == side->num_attached(),
                      "published blocks of a group are counted right");
  }
}

void KvCache::Clear() {
  for (const auto& side : sides_) {
    while (side->EvictOldest()) {
    }
  }
  index_.Clear();
}

}  // namespace tokenspeed
