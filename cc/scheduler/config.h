// SPDX-License-Identifier: MIT
//
// What the scheduler is told once, and what it is told about a request. No field has a default:
// every call site decides. `Validate` names the field that cannot be.

#pragma once

#include <cstdint>
#include <vector>

#include "cc/base/ids.h"
#include "cc/base/status.h"
#include "cc/cache/group.h"

namespace tokenspeed {

// What an engine does with a request: all of it, its prompt only, or its answer only.
enum class Role : uint8_t { kFused = 0, kPrefill = 1, kDecode = 2 };

// The store that engines share, behind the host tier.
struct StoreConfig {
  bool enabled;
  int32_t max_prefetches;       // requests for which it is asked at once
  int32_t max_puts;             // transfers to it in flight
  int32_t min_blocks;           // fewer missing blocks are computed without asking
  int64_t prefetch_timeout_us;  // of a request: query and get
  int64_t put_timeout_us;
  int64_t backoff_us;  // how long it is left alone after a failure; doubles with each further one
  int64_t max_backoff_us;
};

struct SchedulerConfig {
  int32_t num_blocks;             // device pool, including block 0, which is never handed out
  int32_t block_size;             // tokens
  int32_t max_num_seqs;           // requests that hold blocks and run at once
  int32_t max_model_len;          // prompt + output, tokens
  int32_t max_batched_tokens;     // budget of a step: decode rows and prefill chunks
  bool chunked_prefill;           // false: a prompt is one row, whole
  int32_t overlap_depth;          // steps in flight while the next one is planned
  int32_t verify_width;           // tokens a decode row carries; 1 is plain decoding
  bool verify_overlap;            // rows may follow rows whose drafts are not judged yet
  int32_t max_decode_gap_tokens;  // prefill tokens between two tokens of a running request
  int32_t context_cost_tokens;  // a prompt's token behind so many others counts twice in that gap,
                                // behind twice as many thrice, and so on; 0: every token once
  bool enable_prefix_caching;
  std::vector<int32_t> eos_token_ids;
  Role role;
  int32_t num_host_blocks;         // of the host tier; 0: there is none
  std::vector<CacheGroup> groups;  // the first one keeps the full history
  int32_t num_layers;        // in which loads from the host tier are told to proceed; 1: as a whole
  int32_t load_lead_layers;  // so many must be loaded before a step may run behind the load
  StoreConfig store;
};

Status Validate(const SchedulerConfig& config);

struct RequestSpec {
  RequestId id;
  std::vector<int32_t> token_ids;
  int32_t max_new_tokens;
  int32_t min_new_tokens;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos;
  int32_t priority;  // lower runs first
  int64_t cache_salt;
  int64_t adapter;
};

// Whether the request is well-formed and could ever run alone under `config`.
Status Validate(const RequestSpec& spec, const SchedulerConfig& config);

}  // namespace tokenspeed
