// SPDX-License-Identifier: MIT

#include "cc/cache/block_pool.h"

#include <bit>

namespace tokenspeed {

BlockPool::BlockPool(int32_t num_blocks)
    : num_total_(num_blocks - 1), is_free_(static_cast<size_t>(num_blocks), true) {
  free_.reserve(static_cast<size_t>(num_total_));
  is_free_[0] = false;
  for (int32_t id = num_blocks - 1; id > 0; --id) free_.emplace_back(id);
}

BlockRef BlockPool::Take() {
  if (free_.empty()) return {};
  const BlockId id = free_.back();
  free_.pop_back();
  is_free_[id.index()] = false;
  return Make(id);
}

void BlockPool::Return(BlockId id) {
  // Capacity was reserved for every block at construction: this allocates nothing and so cannot
  // throw.
  is_free_[id.index()] = true;
  free_.push_back(id);
}

GroupPool::GroupPool(BlockPool& parents, int32_t blocks_per_parent)
    : parents_(parents),
      blocks_per_parent_(blocks_per_parent),
      families_(static_cast<size_t>(parents.num_total()) + 1),
      place_(static_cast<size_t>(parents.num_total()) + 1, -1) {
  with_room_.reserve(families_.size());
}

uint64_t GroupPool::AllFree() const {
  return blocks_per_parent_ == 64 ? ~uint64_t{0} : (uint64_t{1} << blocks_per_parent_) - 1;
}

BlockRef GroupPool::Take() {
  if (with_room_.empty()) {
    BlockRef parent = parents_.Take();
    if (!parent) return {};
    const int32_t id = parent.id().value();
    families_[static_cast<size_t>(id)] = {std::move(parent), AllFree()};
    place_[static_cast<size_t>(id)] = static_cast<int32_t>(with_room_.size());
    with_room_.push_back(id);
    num_free_children_ += blocks_per_parent_;
    ++num_parents_;
  }
  const int32_t parent = with_room_.back();
  Family& family = families_[static_cast<size_t>(parent)];
  const int32_t child = std::countr_zero(family.free);
  family.free &= family.free - 1;
  --num_free_children_;
  if (family.free == 0) {
    with_room_.pop_back();
    place_[static_cast<size_t>(parent)] = -1;
  }
  return Make(BlockId(parent * blocks_per_parent_ + child));
}

void GroupPool::Return(BlockId id) {
  const auto parent = static_cast<size_t>(id.value() / blocks_per_parent_);
  Family& family = families_[parent];
  if (family.free == 0) {
    place_[parent] = static_cast<int32_t>(with_room_.size());
    with_room_.push_back(static_cast<int32_t>(parent));
  }
  family.free |= uint64_t{1} << (id.value() % blocks_per_parent_);
  ++num_free_children_;
  if (family.free != AllFree()) return;
  // The last one takes the place of the one that goes.
  const auto hole = static_cast<size_t>(place_[parent]);
  with_room_[hole] = with_room_.back();
  place_[static_cast<size_t>(with_room_[hole])] = static_cast<int32_t>(hole);
  with_room_.pop_back();
  place_[parent] = -1;
  num_free_children_ -= blocks_per_parent_;
  --num_parents_;
  family = Family();
}

bool GroupPool::IsFree(BlockId id) const {
  const Family& family = families_[static_cast<size_t>(id.value() / blocks_per_parent_)];
  return !family.parent || (family.free >> (id.value() % blocks_per_parent_) & 1) != 0;
}

}  // namespace tokenspeed
