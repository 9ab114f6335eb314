// SPDX-License-Identifier: MIT
//
// The device blocks that hold no content. `BlockRef` is the only way to hold a block: move-only,
// and when it dies the block is back in the pool. So a block has exactly one owner at every moment:
// this pool, one request's `Residence`, or the prefix index. Called by the cache layer on the
// scheduler's thread. It never looks at tokens and never blocks.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/base/ids.h"

namespace tokenspeed {

class BlockPool;

class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(BlockRef&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, BlockId())) {}
  BlockRef& operator=(BlockRef&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(id_, other.id_);
    return *this;
  }
  BlockRef(const BlockRef&) = delete;
  BlockRef& operator=(const BlockRef&) = delete;
  ~BlockRef();

  explicit operator bool() const { return pool_ != nullptr; }
  BlockId id() const { return id_; }

 private:
  friend class BlockPool;
  BlockRef(BlockPool* pool, BlockId id) : pool_(pool), id_(id) {}
  BlockPool* pool_ = nullptr;
  BlockId id_;
};

class BlockPool {
 public:
  // `num_blocks` counts block 0, which padding rows write to and nobody ever owns.
  explicit BlockPool(int32_t num_blocks);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // The block that came back last, so that a warm one is reused. Empty when none is free.
  BlockRef Take();

  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  // Blocks that can be owned at all: everything but block 0.
  int32_t num_total() const { return num_total_; }
  bool IsFree(BlockId id) const { return is_free_[id.index()]; }

 private:
  friend class BlockRef;
  void Return(BlockId id);

  int32_t num_total_;
  std::vector<BlockId> free_;
  std::vector<bool> is_free_;
};

inline BlockRef::~BlockRef() {
  if (pool_ != nullptr) pool_->Return(id_);
}

}  // namespace tokenspeed
