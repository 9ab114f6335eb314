// SPDX-License-Identifier: MIT
//
// The half of `KvCache` that hands what settled over to the prefix index and the side caches.

#include <algorithm>
#include <utility>

#include "cc/base/status.h"
#include "cc/cache/kv_cache.h"

namespace tokenspeed {

std::optional<GroupCopy> KvCache::SaveState(Residence& residence, int32_t g, StateMark mark) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return std::nullopt;
  BlockRef block = TakeOrEvict(g);
  if (!block) return std::nullopt;
  SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
  const BlockId from = side.own[static_cast<size_t>(mark.column)].id();
  const GroupCopy copy{g, from, block.id()};
  side.saved.push_back({mark.num_tokens / config_.block_size, std::move(block)});
  return copy;
}

void KvCache::DropStatesBehind(Residence& residence, int32_t num_settled) {
  for (SideColumns& side : residence.sides_) {
    std::erase_if(side.saved, [&](const SavedState& s) {
      return s.num_blocks * config_.block_size > num_settled;
    });
  }
}

void KvCache::ReleaseBehindWindow(Residence& residence, int32_t num_settled) {
  for (int32_t g = 1; g < num_groups(); ++g) {
    if (group(g).kind != GroupKind::kWindow) continue;
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

void KvCache::Attach(int32_t g, BlockId node, BlockRef block) {
  sides_[static_cast<size_t>(g) - 1]->Attach(node, std::move(block));
  if (records_stored_ && index_.IsFull(node)) stored_.push_back({index_.CursorAt(node, 0), g});
}

void KvCache::PublishSides(Residence& residence, int32_t column) {
  const BlockId node = residence.tip();
  for (int32_t g = 1; g < num_groups(); ++g) {
    SideCache& cache = *sides_[static_cast<size_t>(g) - 1];
    SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
    if (group(g).kind == GroupKind::kState) {
      for (SavedState& state : side.saved) {
        if (state.num_blocks == column + 1 && !cache.Has(node))
          Attach(g, node, std::move(state.block));
      }
      std::erase_if(side.saved, [&](const SavedState& s) { return s.num_blocks <= column + 1; });
      continue;
    }
    BlockRef& own = side.own[static_cast<size_t>(column)];
    if (!own || cache.Has(node)) continue;  // let go already, or an equal one is there
    Attach(g, node, std::move(own));
    side.shared[static_cast<size_t>(column)] = cache.Pin(node);
  }
}

void KvCache::ShareSides(Residence& residence, int32_t num_settled) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return;
  const int32_t known = std::min(residence.num_published_, num_settled / config_.block_size);
  BlockId node = residence.tip();
  for (int32_t column = residence.num_published_ - 1; column >= 0 && num_groups() > 1; --column) {
    for (int32_t g = 1; g < num_groups() && column < known; ++g) {
      SideCache& cache = *sides_[static_cast<size_t>(g) - 1];
      SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
      const auto i = static_cast<size_t>(column);
      if (group(g).kind != GroupKind::kWindow || !side.own[i] || cache.Has(node)) continue;
      Attach(g, node, std::move(side.own[i]));
      side.shared[i] = cache.Pin(node);
    }
    node = index_.ParentOf(node);
  }
}

bool KvCache::HasStateGroup() const {
  return std::ranges::any_of(config_.groups,
                             [](const CacheGroup& g) { return g.kind == GroupKind::kState; });
}

void KvCache::AttachStates(Residence& residence, BlockId node, int32_t column) {
  for (int32_t g = 1; g < num_groups(); ++g) {
    if (group(g).kind != GroupKind::kState || side(g).Has(node)) continue;
    BlockRef& working =
        residence.sides_[static_cast<size_t>(g) - 1].own[static_cast<size_t>(column)];
    Attach(g, node, std::move(working));
  }
}

void KvCache::PublishTail(Residence& residence, const Content& content, int32_t num_settled,
                          StateMark state) {
  const bool has_state = state.num_tokens == num_settled;
  const int32_t column = residence.num_published_;
  const int32_t start = column * config_.block_size;
  if (num_settled <= start) {
    const bool at_tip = num_settled == start && residence.tip().valid();
    if (has_state && at_tip) AttachStates(residence, residence.tip(), state.column);
    return;
  }
  // Where states are kept, a tail without one can never be continued.
  if (HasStateGroup() && !has_state) return;
  const auto i = static_cast<size_t>(column);
  const auto tail =
      content.tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(num_settled - start));
  const BlockId node = index_.PublishTail(residence.tip(), residence.identity_,
                                          std::move(residence.columns_[i]), tail, !HasStateGroup());
  if (!node.valid()) return;
  for (int32_t g = 1; g < num_groups(); ++g) {
    SideColumns& side = residence.sides_[static_cast<size_t>(g) - 1];
    if (group(g).kind != GroupKind::kWindow || this->side(g).Has(node)) continue;
    if (i < side.own.size() && side.own[i]) Attach(g, node, std::move(side.own[i]));
  }
  if (has_state) AttachStates(residence, node, state.column);
}

void KvCache::MoveOut(Residence residence, const Content& content, int32_t num_settled,
                      StateMark state) {
  if (!config_.enable_prefix_caching || !residence.publishes_) return;
  Publish(residence, content, num_settled);
  PublishTail(residence, content, num_settled, state);
}

void KvCache::RecordStored() {
  records_stored_ = true;
  index_.RecordStored();
}

std::vector<StoredBlock> KvCache::TakeStored() {
  std::vector<StoredBlock> stored;
  for (const PrefixCursor& node : index_.TakeStored()) stored.push_back({node, 0});
  std::ranges::move(stored_, std::back_inserter(stored));
  stored_.clear();
  return stored;
}

BlockId KvCache::BlockOf(BlockId node, int32_t g) const {
  if (g == 0) return node;
  return side(g).Has(node) ? side(g).BlockOf(node) : BlockId();
}

}  // namespace tokenspeed
