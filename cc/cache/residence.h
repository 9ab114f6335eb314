// SPDX-License-Identifier: MIT
//
// What a request owns on the device: its row, a pin on the published path it reads, and the private
// blocks behind it. Column i of the row is block i of the sequence; columns the index owns hold an
// empty ref here. Move-only: the states of a request pass it on, a step's ticket keeps it while a
// step in flight still uses it, and when it dies the row, the pin and the blocks are returned.
// Built and changed by `KvCache` only.

#pragma once

#include <cstdint>
#include <vector>

#include "cc/base/ids.h"
#include "cc/cache/block_pool.h"
#include "cc/cache/identity.h"
#include "cc/cache/prefix_index.h"
#include "cc/cache/side_columns.h"
#include "cc/cache/slot_pool.h"

namespace tokenspeed {

// A block of `group` whose content is to be copied into another one.
struct GroupCopy {
  int32_t group;
  BlockId from;
  BlockId to;
};

// Copies to run before the first row of a request, and what keeps their sources until they ran.
struct StartCopies {
  std::vector<GroupCopy> copies;
  PathPin tail;
  std::vector<SidePin> sides;
};

class Residence {
 public:
  Residence(Residence&&) = default;
  Residence& operator=(Residence&&) = default;

  SlotId slot() const { return slot_.id(); }
  int32_t num_blocks() const { return static_cast<int32_t>(columns_.size()); }
  // Leading blocks whose content the index knows, on the path that the pin keeps.
  int32_t num_published() const { return num_published_; }
  const std::vector<BlockRef>& columns() const { return columns_; }
  // False once its content no longer matches any identity.
  bool publishes() const { return publishes_; }
  BlockId tip() const { return pin_.node(); }
  // By group, from group 1 on.
  const std::vector<SideColumns>& sides() const { return sides_; }

 private:
  friend class KvCache;
  Residence(SlotRef slot, PathPin pin, Identity identity)
      : slot_(std::move(slot)), pin_(std::move(pin)), identity_(identity) {}

  SlotRef slot_;
  PathPin pin_;
  std::vector<BlockRef> columns_;
  std::vector<SideColumns> sides_;
  StartCopies start_copies_;
  Identity identity_;
  int32_t num_published_ = 0;
  bool publishes_ = true;
};

}  // namespace tokenspeed
