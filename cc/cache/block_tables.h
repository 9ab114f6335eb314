// SPDX-License-Identifier: MIT
//
// One int32 matrix [num_slots, max_blocks_per_seq], row-major, exported without a copy: what
// attention reads. Every write is also recorded as a delta (slot, column, block) for mirrors on a
// device; a plan takes the deltas since the plan before. Cells of a row are only appended while a
// request lives there, and a row is not written for a new request before the last step that reads
// it has settled. Written by `Residence` on the scheduler's thread; read by the engine between
// plan() calls.

#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cc/base/ids.h"

namespace tokenspeed {

struct TableUpdate {
  int32_t slot;
  int32_t column;
  int32_t block;
};
static_assert(sizeof(TableUpdate) == 3 * sizeof(int32_t), "exported as int32[U, 3]");

class BlockTables {
 public:
  BlockTables(int32_t num_slots, int32_t max_blocks_per_seq)
      : num_slots_(num_slots),
        num_columns_(max_blocks_per_seq),
        cells_(static_cast<size_t>(num_slots) * static_cast<size_t>(max_blocks_per_seq), 0) {}

  void Set(SlotId slot, int32_t column, BlockId block) {
    cells_[slot.index() * static_cast<size_t>(num_columns_) + static_cast<size_t>(column)] =
        block.value();
    updates_.push_back({slot.value(), column, block.value()});
  }
  int32_t At(SlotId slot, int32_t column) const {
    return cells_[slot.index() * static_cast<size_t>(num_columns_) + static_cast<size_t>(column)];
  }
  std::vector<TableUpdate> TakeUpdates() { return std::exchange(updates_, {}); }

  std::span<const int32_t> cells() const { return cells_; }
  int32_t num_slots() const { return num_slots_; }
  int32_t num_columns() const { return num_columns_; }

 private:
  int32_t num_slots_;
  int32_t num_columns_;
  std::vector<int32_t> cells_;
  std::vector<TableUpdate> updates_;
};

}  // namespace tokenspeed
