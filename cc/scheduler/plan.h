// SPDX-License-Identifier: MIT
//
// What goes out of the scheduler: a `Plan` for one step, the `Outcome` of a settled one, and small
// reports. All are immutable once handed out and shared with the binding, whose numpy arrays view
// these vectors.

#pragma once

#include <cstdint>
#include <vector>

#include "cc/base/ids.h"
#include "cc/cache/block_tables.h"
#include "cc/request/request.h"

namespace tokenspeed {

struct BlockCopy {
  int32_t from;
  int32_t to;
};
static_assert(sizeof(BlockCopy) == 2 * sizeof(int32_t), "exported as int32[C, 2]");

// What a step means to one cache group beyond the first.
struct GroupPlan {
  std::vector<TableUpdate> table_updates;
  std::vector<BlockCopy> copies;  // before the step
  std::vector<BlockCopy> saves;   // behind it: states to keep as they are then
  // State groups, a row each: the column of its table row with the state before its query; -1: that
  // of the last token which the row before kept, known on the device.
  std::vector<int32_t> state_columns;
};

// A load that a step runs behind: before it computes layer l >= `layers_done`, layer l of the
// transfer must be there.
struct LoadWait {
  int64_t transfer_id;
  int64_t layers_done;
};
static_assert(sizeof(LoadWait) == 2 * sizeof(int64_t), "exported as int64[W, 2]");

// One step. Rows are decodes first, then prefill chunks; all row arrays have equal length.
struct Plan {
  int64_t step_id = -1;
  int32_t num_decode_rows = 0;
  std::vector<int64_t> request_ids;
  std::vector<int32_t> slots;
  std::vector<int32_t> query_lens;
  std::vector<int32_t> context_lens;   // tokens in the cache before this step's query, at most
  std::vector<int32_t> context_slack;  // drafts in flight: the context may be less by as many
  std::vector<uint8_t> samples;        // whether the row's last position yields tokens
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> new_slots;
  std::vector<int64_t> new_slot_request_ids;
  std::vector<BlockCopy> block_copies;
  std::vector<TableUpdate> table_updates;
  std::vector<GroupPlan> groups;  // from group 1 on
  std::vector<LoadWait> load_waits;

  int32_t num_rows() const { return static_cast<int32_t>(request_ids.size()); }
};

// One entry for each request that produced tokens or ended when a step settled.
struct Outcome {
  std::vector<int64_t> request_ids;
  std::vector<int32_t> rows;
  std::vector<int32_t> num_tokens;
  std::vector<uint8_t> finish;
  std::vector<int32_t> prompt_tokens;
  std::vector<int32_t> completion_tokens;
  std::vector<int32_t> cached_tokens;
  std::vector<int32_t> matched_tokens;
};

// The terminal event of a request that did not end in a step.
struct Ended {
  int64_t request_id;
  Finish finish;
  RequestCounters counters;
};

// What the store was good for, since the beginning.
struct StoreCounters {
  int64_t num_queries = 0;
  int64_t num_gets = 0;
  int64_t num_partial_gets = 0;
  int64_t hit_tokens = 0;  // that arrived whole
  int64_t num_puts = 0;    // blocks that it took
  int64_t num_timeouts = 0;
  int64_t num_failures = 0;
  int64_t num_skipped = 0;  // requests that did not ask: it was left alone, or had no room here
};

struct Load {
  int32_t num_running;
  int32_t num_waiting;
  int32_t active_blocks;
  int32_t cached_blocks;  // kept for prefix hits, free for the taking
  int32_t free_blocks;
  int32_t total_blocks;
  // The host tier, all 0 without one: entries, blocks being copied into, and parents with nothing
  // in them.
  int32_t host_cached_blocks;
  int32_t host_reserved_blocks;
  int32_t host_free_blocks;
};

}  // namespace tokenspeed
