// SPDX-License-Identifier: MIT
//
// The order in which idle leaves are evicted: least recent use first, lower number on a tie.
// `Key` is a strong id. An indexed binary heap over flat arrays: O(log n) to add, remove or pop,
// no allocation after construction. Used by `PrefixIndex`, `SideCache` and `HostTier`.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cc/base/ids.h"

namespace tokenspeed {

template <class Key>
class EvictOrder {
 public:
  explicit EvictOrder(int32_t num_blocks) : position_(static_cast<size_t>(num_blocks), -1) {
    heap_.reserve(static_cast<size_t>(num_blocks));
  }

  bool empty() const { return heap_.empty(); }
  int32_t size() const { return static_cast<int32_t>(heap_.size()); }
  bool Contains(Key block) const { return position_[block.index()] >= 0; }
  Key Oldest() const { return heap_.front().block; }

  void Add(Key block, uint64_t last_use) {
    heap_.push_back({last_use, block});
    SiftUp(heap_.size() - 1);
  }

  void Remove(Key block) {
    const auto hole = static_cast<size_t>(position_[block.index()]);
    position_[block.index()] = -1;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (hole == heap_.size()) return;
    Place(hole, last);
    SiftUp(hole);
    SiftDown(static_cast<size_t>(position_[last.block.index()]));
  }

 private:
  struct Entry {
    uint64_t last_use;
    Key block;
    auto operator<=>(const Entry&) const = default;
  };

  void Place(size_t at, Entry entry) {
    heap_[at] = entry;
    position_[entry.block.index()] = static_cast<int32_t>(at);
  }
  void SiftUp(size_t at) {
    const Entry entry = heap_[at];
    while (at > 0 && entry < heap_[(at - 1) / 2]) {
      Place(at, heap_[(at - 1) / 2]);
      at = (at - 1) / 2;
    }
    Place(at, entry);
  }
  void SiftDown(size_t at) {
    const Entry entry = heap_[at];
    for (size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < entry)) break;
      Place(at, heap_[child]);
      at = child;
    }
    Place(at, entry);
  }

  std::vector<Entry> heap_;
  std::vector<int32_t> position_;
};

}  // namespace tokenspeed
