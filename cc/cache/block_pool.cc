// SPDX-License-Identifier: MIT

#include "cc/cache/block_pool.h"

namespace tokenspeed {

BlockPool::BlockPool(int32_t num_blocks)
    : num_total_(num_blocks - 1), is_free_(static_cast<size_t>(num_blocks), true) {
  free_.reserve(static_cast<size_t>(num_total_));
  is_free_[0] = false;
  for (int32_t id = num_blocks - 1; id > 0; --id) free_.push_back(BlockId(id));
}

BlockRef BlockPool::Take() {
  if (free_.empty()) return {};
  const BlockId id = free_.back();
  free_.pop_back();
  is_free_[id.index()] = false;
  return BlockRef(this, id);
}

void BlockPool::Return(BlockId id) {
  // Capacity was reserved for every block at construction: this allocates nothing and so cannot
  // throw.
  is_free_[id.index()] = true;
  free_.push_back(id);
}

}  // namespace tokenspeed
