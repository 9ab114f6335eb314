// SPDX-License-Identifier: MIT
//
// The kinds of attention a model mixes. Each kind keeps its KV in a cache group of its own; all
// groups share one pool of parent blocks, each split into `blocks_per_parent` blocks of a group, so
// that groups whose blocks differ in bytes fill the same memory. Group 0 keeps the full history and
// names the prefix; the others hang on to it. Pure values.

#pragma once

#include <algorithm>
#include <cstdint>

namespace tokenspeed {

enum class GroupKind : uint8_t {
  kFull = 0,    // every token back to the first
  kWindow = 1,  // the last `window_tokens`
  kState = 2,   // one recurrent state a request, saved every `checkpoint_tokens`
};

struct CacheGroup {
  GroupKind kind;
  int32_t blocks_per_parent;
  int32_t window_tokens;      // kWindow; 0 otherwise
  int32_t checkpoint_tokens;  // kState, a multiple of the block size; 0 otherwise

  // The first block that a query at `position` still reads.
  int32_t FirstLiveBlock(int32_t position, int32_t block_size) const {
    if (kind != GroupKind::kWindow) return 0;
    return std::max(0, position - window_tokens + 1) / block_size;
  }
};

}  // namespace tokenspeed
