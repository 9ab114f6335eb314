// SPDX-License-Identifier: MIT
//
// The published blocks of one cache group beyond the first: at most one a node of the prefix index,
// which says what the block's content is. They may be evicted on their own, by last use, which
// costs the node this group's hits and nothing else; when a node leaves the index its blocks here
// go with it. A `SidePin` keeps a block that a request reads. Owned by `KvCache`; scheduler's
// thread only.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/base/ids.h"
#include "cc/base/status.h"
#include "cc/cache/block_pool.h"
#include "cc/cache/evict_order.h"

namespace tokenspeed {

class SideCache;

class SidePin {
 public:
  SidePin() = default;
  SidePin(SidePin&& other) noexcept
      : cache_(std::exchange(other.cache_, nullptr)),
        node_(std::exchange(other.node_, BlockId())) {}
  SidePin& operator=(SidePin&& other) noexcept {
    std::swap(cache_, other.cache_);
    std::swap(node_, other.node_);
    return *this;
  }
  SidePin(const SidePin&) = delete;
  SidePin& operator=(const SidePin&) = delete;
  inline ~SidePin();

  explicit operator bool() const { return cache_ != nullptr; }

 private:
  friend class SideCache;
  SidePin(SideCache* cache, BlockId node) : cache_(cache), node_(node) {}
  SideCache* cache_ = nullptr;
  BlockId node_;
};

class SideCache {
 public:
  explicit SideCache(int32_t num_nodes)
      : entries_(static_cast<size_t>(num_nodes)), evict_order_(num_nodes) {}
  SideCache(const SideCache&) = delete;
  SideCache& operator=(const SideCache&) = delete;

  bool Has(BlockId node) const { return static_cast<bool>(entries_[node.index()].block); }
  BlockId BlockOf(BlockId node) const { return entries_[node.index()].block.id(); }

  void Attach(BlockId node, BlockRef block) {
    Check(!Has(node), "a node has one block of a group");
    entries_[node.index()].block = std::move(block);
    ++num_attached_;
    evict_order_.Add(node, ++clock_);
  }
  SidePin Pin(BlockId node) {
    if (entries_[node.index()].num_pins++ == 0) evict_order_.Remove(node);
    return SidePin(this, node);
  }
  // The block of a node that leaves the index, empty when it has none.
  BlockRef Drop(BlockId node) {
    if (!Has(node)) return {};
    Check(entries_[node.index()].num_pins == 0, "a block that is read is not dropped");
    evict_order_.Remove(node);
    --num_attached_;
    return std::move(entries_[node.index()].block);
  }
  BlockRef EvictOldest() { return evict_order_.empty() ? BlockRef() : Drop(evict_order_.Oldest()); }

  int32_t num_attached() const { return num_attached_; }
  int32_t num_idle() const { return evict_order_.size(); }

 private:
  friend class SidePin;
  struct Entry {
    BlockRef block;
    int32_t num_pins = 0;
  };
  void Unpin(BlockId node) {
    if (--entries_[node.index()].num_pins == 0) evict_order_.Add(node, ++clock_);
  }

  std::vector<Entry> entries_;  // by node
  EvictOrder<BlockId> evict_order_;
  uint64_t clock_ = 0;
  int32_t num_attached_ = 0;
};

SidePin::~SidePin() {
  if (cache_ != nullptr) cache_->Unpin(node_);
}

}  // namespace tokenspeed
