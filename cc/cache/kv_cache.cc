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
    const int32_t columns =
        group.kind == GroupKind::kState ? config.num_state_columns : config.max_blocks_per_seq;
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
  if (!config_.enable_prefix_caching) return {};
  const int32_t start = path.num_blocks * config_.block_size;
  const int32_t length = std::min(num_tokens_limit - start, config_.block_size);
  if (length <= 0) return {};
  const std::vector<BlockId> nodes = num_groups() > 1 ? PathOf(path) : std::vector<BlockId>();
  return index_.FindTail(
      path.node, identity,
      content.tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(length)),
      [&](BlockId node, int32_t common) { return TailSuits(node, common, start + common, nodes); });
}

bool KvCache::TailSuits(BlockId node, int32_t num_tokens, int32_t start,
                        const std::vector<BlockId>& path) const {
  for (int32_t g = 1; g < num_groups(); ++g) {
    if (!side(g).Has(node)) return false;
    const bool suits = group(g).kind == GroupKind::kState ? index_.num_tokens(node) == num_tokens
                                                          : WindowReaches(g, start, path);
    if (!suits) return false;
  }
  return true;
}

bool KvCache::WindowReaches(int32_t g, int32_t num_tokens, const std::vector<BlockId>& path) const {
  const int32_t first = group(g).FirstLiveBlock(num_tokens, config_.block_size);
  const auto live = std::span(path).subspan(std::min(static_cast<size_t>(first), path.size()));
  return std::ranges::all_of(live, [&](BlockId node) { return side(g).Has(node); });
}

std::vector<BlockId> KvCache::PathOf(const PrefixCursor& path) const {
  std::vector<BlockId> nodes(static_cast<size_t>(path.num_blocks));
  BlockId node = path.node;
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it, node = index_.ParentOf(node)) *it = node;
  return nodes;
}

PrefixCursor KvCache::Prefix(const PrefixCursor& path, int32_t num_blocks) const {
  if (num_blocks >= path.num_blocks) return path;
  if (num_blocks == 0) return {};
  return index_.CursorAt(PathOf(path)[static_cast<size_t>(num_blocks) - 1], num_blocks);
}

int32_t KvCache::Joint(const PrefixCursor& path, int32_t limit, const Elsewhere& elsewhere) const {
  if (num_groups() == 1) return limit;
  const std::vector<BlockId> nodes = PathOf(path);
  const auto has = [&](int32_t g, int32_t column) {
    const auto i = static_cast<size_t>(column);
    return (i < nodes.size() && side(g).Has(nodes[i])) || elsewhere(g, column);
  };
  // By group, whether each column is there; for a window, the first column of the unbroken run of
  // blocks that ends before each depth.
  std::vector<std::vector<int32_t>> run_start(sides_.size());
  for (int32_t g = 1; g < num_groups(); ++g) {
    auto& starts = run_start[static_cast<size_t>(g) - 1];
    starts.push_back(0);
    for (int32_t i = 0; i < limit; ++i) starts.push_back(has(g, i) ? starts.back() : i + 1);
  }
  const auto continues_at = [&](int32_t depth, int32_t g) {
    const int32_t start = run_start[static_cast<size_t>(g) - 1][static_cast<size_t>(depth)];
    if (group(g).kind == GroupKind::kState) return start < depth;
    return start <= group(g).FirstLiveBlock(depth * config_.block_size, config_.block_size);
  };
  for (int32_t depth = limit; depth > 0; --depth) {
    bool all = true;
    for (int32_t g = 1; g < num_groups() && all; ++g) all = continues_at(depth, g);
    if (all) return depth;
  }
  return 0;
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

void KvCache::AdoptWindow(Residence& residence, int32_t g, const Start& start,
                          const std::vector<BlockId>& path) {
  SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
  SideCache& cache = *sides_[static_cast<size_t>(g) - 1];
  side.num_released = group(g).FirstLiveBlock(start.num_tokens, config_.block_size);
  side.own.resize(static_cast<size_t>(side.num_released));
  side.shared.resize(static_cast<size_t>(side.num_released));
  const int32_t end = CeilDiv(start.num_tokens, config_.block_size);
  for (int32_t column = side.num_released; column < end; ++column) {
    const auto i = static_cast<size_t>(column);
    side.own.emplace_back();
    side.shared.emplace_back();
    if (i >= path.size() || !cache.Has(path[i])) continue;
    side.shared.back() = cache.Pin(path[i]);
    tables(g).Set(residence.slot(), column, cache.BlockOf(path[i]));
  }
}

bool KvCache::FillWindow(Residence& residence, int32_t g, const Start& start) {
  SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
  const TailHit& tail = start.hit.tail;
  for (size_t i = static_cast<size_t>(side.num_released); i < side.own.size(); ++i) {
    if (side.shared[i]) continue;
    side.own[i] = TakeOrEvict(g);
    if (!side.own[i]) return false;
    tables(g).Set(residence.slot(), static_cast<int32_t>(i), side.own[i].id());
    if (static_cast<int32_t>(i) != start.hit.path.num_blocks || !tail.node.valid()) continue;
    residence.start_copies_.copies.push_back({g, BlockOf(tail.node, g), side.own[i].id()});
  }
  return true;
}

BlockId KvCache::StateSource(int32_t g, const Start& start) const {
  const PrefixHit& hit = start.hit;
  if (hit.tail.node.valid()) return hit.tail.node;
  const bool at_end = hit.path.num_blocks * config_.block_size == start.num_tokens;
  return at_end && hit.path.node.valid() && side(g).Has(hit.path.node) ? hit.path.node : BlockId();
}

bool KvCache::FillStates(Residence& residence, int32_t g, const Start& start) {
  for (int32_t column = 0; column < config_.num_state_columns; ++column) {
    BlockRef working = TakeOrEvict(g);
    if (!working) return false;
    const BlockId from = column == 0 ? StateSource(g, start) : BlockId();
    if (from.valid()) residence.start_copies_.copies.push_back({g, BlockOf(from, g), working.id()});
    AppendSide(residence, g, std::move(working));
  }
  return true;
}

void KvCache::AdoptSides(Residence& residence, const Start& start,
                         const std::vector<BlockId>& path) {
  residence.sides_.resize(sides_.size());
  for (int32_t g = 1; g < num_groups(); ++g) {
    const bool is_window = group(g).kind == GroupKind::kWindow;
    const BlockId source = is_window ? start.hit.tail.node : StateSource(g, start);
    if (source.valid()) {
      residence.start_copies_.sides.push_back(sides_[static_cast<size_t>(g) - 1]->Pin(source));
    }
    if (is_window) AdoptWindow(residence, g, start, path);
  }
}

std::optional<Residence> KvCache::MoveIn(const Start& start, const Identity& identity,
                                         int32_t num_tokens, int32_t num_spare_blocks) {
  const PrefixHit& hit = start.hit;
  SlotRef slot = slots_.Take();
  if (!slot) return std::nullopt;
  // Pinned before blocks are reserved, so that the reservation cannot evict what it is meant to
  // extend.
  PathPin pin = index_.Pin(hit.path.node);
  PathPin tail = index_.Pin(hit.tail.node);
  const std::vector<BlockId> path = PathOf(hit.path);
  Residence residence(std::move(slot), std::move(pin), identity);
  AdoptSides(residence, start, path);
  for (int32_t g = 1; g < num_groups(); ++g) {
    const bool filled = group(g).kind == GroupKind::kWindow ? FillWindow(residence, g, start)
                                                            : FillStates(residence, g, start);
    if (!filled) return std::nullopt;
  }
  const int32_t num_new = CeilDiv(num_tokens, config_.block_size) - hit.path.num_blocks;
  if (split_.empty() && num_new + num_spare_blocks > num_available()) return std::nullopt;
  auto blocks = Reserve(0, split_.empty() ? num_new : num_new + num_spare_blocks);
  if (!blocks) return std::nullopt;
  blocks->resize(static_cast<size_t>(num_new));  // the spare ones only had to be there

  AdoptPath(residence, path);
  for (BlockRef& block : *blocks) Append(residence, std::move(block));
  if (hit.tail.node.valid()) {
    const BlockId to = residence.columns_[static_cast<size_t>(hit.path.num_blocks)].id();
    residence.start_copies_.copies.push_back({0, hit.tail.node, to});
    residence.start_copies_.tail = std::move(tail);
  }
  return residence;
}

std::vector<BlockPlace> KvCache::Incoming(const Residence& residence, const Start& start) const {
  std::vector<BlockPlace> places;
  const int32_t num_here = start.hit.path.num_blocks * config_.block_size;
  if (start.num_tokens == 0 || start.hit.tail.node.valid()) return places;
  for (int32_t c = residence.num_published(); num_here < start.num_tokens; ++c) {
    if (c >= CeilDiv(start.num_tokens, config_.block_size)) break;
    places.push_back({0, c, residence.columns_[static_cast<size_t>(c)].id()});
  }
  for (int32_t g = 1; g < num_groups(); ++g) {
    const SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
    const bool is_state = group(g).kind == GroupKind::kState;
    if (is_state && StateSource(g, start).valid()) continue;
    const size_t end = is_state ? 1 : side.own.size();
    for (size_t i = 0; i < end; ++i) {
      if (side.own[i]) places.push_back({g, static_cast<int32_t>(i), side.own[i].id()});
    }
  }
  return places;
}

std::vector<BlockPlace> KvCache::Needed(const Residence& residence, int32_t num_tokens) const {
  std::vector<BlockPlace> places;
  for (int32_t g = 0; g < num_groups(); ++g) {
    const bool is_state = group(g).kind == GroupKind::kState;
    const int32_t end = is_state ? 1 : CeilDiv(num_tokens, config_.block_size);
    int32_t column = is_state ? 0 : group(g).FirstLiveBlock(num_tokens, config_.block_size);
    for (; column < end; ++column) {
      places.push_back({g, column, BlockId(tables(g).At(residence.slot(), column))});
    }
  }
  return places;
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
