// SPDX-License-Identifier: MIT
//
// Blocks that hold no content. `BlockRef` is the only way to hold a block: move-only, and when it
// dies the block is back in its pool. So a block has exactly one owner at every moment: a pool, one
// request's `Residence`, the prefix index, or a ticket. `BlockPool` is the memory itself; a
// `GroupPool` splits blocks of it into smaller ones for one cache group and gives a parent back
// once all its children are free. Called by the cache layer on the scheduler's thread. They never
// look at tokens and never block.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/base/ids.h"

namespace tokenspeed {

class BlockSource;

class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(BlockRef&& other) noexcept
      : source_(std::exchange(other.source_, nullptr)), id_(std::exchange(other.id_, BlockId())) {}
  BlockRef& operator=(BlockRef&& other) noexcept {
    std::swap(source_, other.source_);
    std::swap(id_, other.id_);
    return *this;
  }
  BlockRef(const BlockRef&) = delete;
  BlockRef& operator=(const BlockRef&) = delete;
  ~BlockRef();

  explicit operator bool() const { return source_ != nullptr; }
  BlockId id() const { return id_; }

 private:
  friend class BlockSource;
  BlockRef(BlockSource* source, BlockId id) : source_(source), id_(id) {}
  BlockSource* source_ = nullptr;
  BlockId id_;
};

class BlockSource {
 public:
  BlockSource() = default;
  BlockSource(const BlockSource&) = delete;
  BlockSource& operator=(const BlockSource&) = delete;
  virtual ~BlockSource() = default;

  // Empty when none is free.
  virtual BlockRef Take() = 0;
  // Blocks that Take() could hand out one after the other.
  virtual int32_t num_free() const = 0;
  // Blocks that can be owned at all: block 0, which padding rows write to, is not among them.
  virtual int32_t num_total() const = 0;
  virtual bool IsFree(BlockId id) const = 0;

 protected:
  friend class BlockRef;
  BlockRef Make(BlockId id) { return BlockRef(this, id); }
  virtual void Return(BlockId id) = 0;
};

class BlockPool final : public BlockSource {
 public:
  // `num_blocks` counts block 0.
  explicit BlockPool(int32_t num_blocks);

  // The block that came back last, so that a warm one is reused.
  BlockRef Take() override;
  int32_t num_free() const override { return static_cast<int32_t>(free_.size()); }
  int32_t num_total() const override { return num_total_; }
  bool IsFree(BlockId id) const override { return is_free_[id.index()]; }

 private:
  void Return(BlockId id) override;

  int32_t num_total_;
  std::vector<BlockId> free_;
  std::vector<bool> is_free_;
};

class GroupPool final : public BlockSource {
 public:
  static constexpr int32_t kMaxBlocksPerParent = 64;

  // Block i of parent p is number p * blocks_per_parent + i.
  GroupPool(BlockPool& parents, int32_t blocks_per_parent);

  // From a parent that is in use already when there is one, the lowest free child.
  BlockRef Take() override;
  int32_t num_free() const override {
    return num_free_children_ + parents_.num_free() * blocks_per_parent_;
  }
  int32_t num_total() const override { return parents_.num_total() * blocks_per_parent_; }
  bool IsFree(BlockId id) const override;
  int32_t num_parents() const { return num_parents_; }
  int32_t num_taken() const { return num_parents_ * blocks_per_parent_ - num_free_children_; }

 private:
  struct Family {
    BlockRef parent;
    uint64_t free = 0;  // a bit a child
  };
  void Return(BlockId id) override;
  uint64_t AllFree() const;

  BlockPool& parents_;
  int32_t blocks_per_parent_;
  std::vector<Family> families_;    // by parent block
  std::vector<int32_t> with_room_;  // parents with a free child, the last one is used first
  std::vector<int32_t> place_;      // of a parent in with_room_, -1 when it is not there
  int32_t num_free_children_ = 0;
  int32_t num_parents_ = 0;
};

inline BlockRef::~BlockRef() {
  if (source_ != nullptr) source_->Return(id_);
}

}  // namespace tokenspeed
