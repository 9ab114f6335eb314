// SPDX-License-Identifier: MIT

#include "cc/cache/kv_cache.h"

#include <algorithm>
#include <utility>

#include "cc/base/containers.h"

namespace tokenspeed {

KvCache::KvCache(const KvCacheConfig& config)
    : config_(config),
      pool_(config.num_blocks),
      slots_(config.num_slots),
      tables_(config.num_slots, config.max_blocks_per_seq),
      index_(config.num_blocks, config.block_size) {}

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
  return index_.FindTail(
      path.node, identity,
      content.tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(length)));
}

std::optional<std::vector<BlockRef>> KvCache::Reserve(int32_t num_blocks) {
  if (num_blocks > num_available()) return std::nullopt;
  std::vector<BlockRef> blocks;
  blocks.reserve(static_cast<size_t>(num_blocks));
  while (num_blocks-- > 0) {
    BlockRef block = pool_.Take();
    blocks.push_back(block ? std::move(block) : index_.EvictOldest());
  }
  return blocks;
}

void KvCache::Append(Residence& residence, BlockRef block) {
  tables_.Set(residence.slot(), residence.num_blocks(), block.id());
  residence.columns_.push_back(std::move(block));
}

void KvCache::AdoptPath(Residence& residence, const PrefixCursor& path) {
  residence.num_published_ = path.num_blocks;
  residence.columns_.resize(static_cast<size_t>(path.num_blocks));
  std::vector<BlockId> blocks(static_cast<size_t>(path.num_blocks));
  BlockId node = path.node;
  for (auto it = blocks.rbegin(); it != blocks.rend(); ++it, node = index_.ParentOf(node))
    *it = node;
  for (int32_t column = 0; column < path.num_blocks; ++column) {
    tables_.Set(residence.slot(), column, blocks[static_cast<size_t>(column)]);
  }
}

std::optional<MovedIn> KvCache::MoveIn(const PrefixHit& hit, const Identity& identity,
                                       int32_t num_tokens, int32_t num_spare_blocks) {
  SlotRef slot = slots_.Take();
  if (!slot) return std::nullopt;
  // Pinned before blocks are reserved, so that the reservation cannot evict what it is meant to
  // extend.
  PathPin path = index_.Pin(hit.path.node);
  PathPin copy_source = index_.Pin(hit.tail.node);
  const int32_t num_new = CeilDiv(num_tokens, config_.block_size) - hit.path.num_blocks;
  if (num_new + num_spare_blocks > num_available()) return std::nullopt;
  auto blocks = Reserve(num_new);
  if (!blocks) return std::nullopt;

  Residence residence(std::move(slot), std::move(path), identity);
  AdoptPath(residence, hit.path);
  for (BlockRef& block : *blocks) Append(residence, std::move(block));
  BlockId copy_to;
  if (hit.tail.node.valid()) {
    copy_to = residence.columns_[static_cast<size_t>(hit.path.num_blocks)].id();
  }
  const int32_t cached = hit.path.num_blocks * config_.block_size + hit.tail.num_tokens;
  return MovedIn{std::move(residence), cached, std::move(copy_source), hit.tail.node, copy_to};
}

bool KvCache::Grow(Residence& residence, int32_t num_tokens) {
  const int32_t num_new = CeilDiv(num_tokens, config_.block_size) - residence.num_blocks();
  if (num_new <= 0) return true;
  auto blocks = Reserve(num_new);
  if (!blocks) return false;
  for (BlockRef& block : *blocks) Append(residence, std::move(block));
  return true;
}

void KvCache::Publish(Residence& residence, const Content& content, int32_t num_settled) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return;
  const auto block_size = static_cast<size_t>(config_.block_size);
  const int32_t num_full = num_settled / config_.block_size;
  for (; residence.num_published_ < num_full; ++residence.num_published_) {
    const auto i = static_cast<size_t>(residence.num_published_);
    index_.Publish(residence.pin_, residence.identity_, residence.columns_[i], content.hashes[i],
                   content.tokens.subspan(i * block_size, block_size));
  }
}

void KvCache::MoveOut(Residence residence, const Content& content, int32_t num_settled) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return;
  Publish(residence, content, num_settled);
  const int32_t start = residence.num_published_ * config_.block_size;
  if (num_settled <= start) return;
  const auto tail =
      content.tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(num_settled - start));
  index_.PublishTail(residence.tip(), residence.identity_,
                     std::move(residence.columns_[static_cast<size_t>(residence.num_published_)]),
                     tail);
}

}  // namespace tokenspeed
