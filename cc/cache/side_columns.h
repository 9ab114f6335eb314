// SPDX-License-Identifier: MIT
//
// What a request owns in one cache group beyond the first. Window: one block a column, private or
// shared, those behind the window let go. State: working states, one for each token that a row may
// keep, and saved states that wait until the index has the node they belong to. Part of a
// `Residence`; built and changed by `KvCache` only.

#pragma once

#include <cstdint>
#include <vector>

#include "cc/cache/block_pool.h"
#include "cc/cache/side_cache.h"

namespace tokenspeed {

// A recurrent state: behind how many tokens it is, and in which of the request's state blocks.
struct StateMark {
  int32_t num_tokens;
  int32_t column;
};

struct SavedState {
  int32_t num_blocks;  // the depth in the prefix that it belongs to
  BlockRef block;
};

struct SideColumns {
  std::vector<BlockRef> own;
  std::vector<SidePin> shared;  // as long as `own`; a column is in one of them, or was let go
  int32_t num_released = 0;     // leading columns behind the window
  std::vector<SavedState> saved;
};

}  // namespace tokenspeed
