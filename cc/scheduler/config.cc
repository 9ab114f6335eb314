// SPDX-License-Identifier: MIT

#include "cc/scheduler/config.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "cc/base/containers.h"
#include "cc/cache/block_pool.h"

namespace tokenspeed {
namespace {

// Beyond this a class could not be told from a far future; far more classes than anybody uses.
constexpr int32_t kMaxPriority = 1'000'000;
// Far beyond any machine, and small enough that no product or sum of them leaves its integer.
constexpr int32_t kMaxTokens = 1 << 28;
constexpr int32_t kMaxBlocks = 1 << 24;
constexpr int32_t kMaxBlockSize = 1 << 16;
constexpr int32_t kMaxSeqs = 1 << 20;
constexpr int32_t kMaxSteps = 1 << 10;
constexpr int64_t kMaxMicroseconds = int64_t{1} << 40;

std::string Number(int64_t value) { return std::to_string(value); }

// `least` is 0 or 1.
Status Within(const std::string& field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return Status::Ok();
  const std::string bound = value > most ? " must be at most " + Number(most)
                            : least == 1 ? " must be positive"
                                         : " must not be negative";
  return Status::Invalid(field + bound + ", got " + Number(value));
}

Status Positive(const char* field, int32_t value) {
  return Within(field, value, 1, std::numeric_limits<int32_t>::max());
}

Status ValidateTokens(const RequestSpec& spec) {
  if (spec.token_ids.empty())
    return Status::Invalid("token_ids is empty: a request needs a prompt");
  for (size_t i = 0; i < spec.token_ids.size(); ++i) {
    if (spec.token_ids[i] >= 0) continue;
    return Status::Invalid("token_ids[" + std::to_string(i) +
                           "] is negative: " + Number(spec.token_ids[i]));
  }
  return Status::Ok();
}

// Parent blocks that a request of `num_tokens` takes when it runs alone, at its worst moment.
int32_t ParentsAlone(const SchedulerConfig& config, int32_t num_tokens) {
  const int32_t columns = CeilDiv(num_tokens, config.block_size);
  int32_t parents = 0;
  for (const CacheGroup& group : config.groups) {
    int32_t blocks = columns;
    if (group.kind == GroupKind::kState) blocks = config.verify_width;
    if (group.kind == GroupKind::kWindow) {
      // While a step writes its chunk, the window before the chunk is still read.
      const int64_t steps = config.overlap_depth + 1;
      const int64_t reach = group.window_tokens + steps * config.max_batched_tokens;
      blocks =
          static_cast<int32_t>(std::min<int64_t>(columns, (reach - 1) / config.block_size + 2));
    }
    parents += CeilDiv(blocks, group.blocks_per_parent);
  }
  return parents;
}

Status ValidateFit(const RequestSpec& spec, const SchedulerConfig& config) {
  const auto prompt = static_cast<int64_t>(spec.token_ids.size());
  const int64_t total = prompt + spec.max_new_tokens;
  if (total > config.max_model_len) {
    return Status::Invalid("prompt of " + Number(prompt) + " tokens and max_new_tokens " +
                           Number(spec.max_new_tokens) + " exceed max_model_len " +
                           Number(config.max_model_len));
  }
  if (!config.chunked_prefill && prompt > config.max_batched_tokens) {
    return Status::Invalid("prompt of " + Number(prompt) + " tokens exceeds max_batched_tokens " +
                           Number(config.max_batched_tokens) + ", and chunked_prefill is off");
  }
  if (const int32_t parents = ParentsAlone(config, static_cast<int32_t>(total - 1));
      config.groups.size() > 1 && parents > config.num_blocks - 1) {
    return Status::Invalid("prompt of " + Number(prompt) + " tokens and max_new_tokens " +
                           Number(spec.max_new_tokens) + " need " + Number(parents) +
                           " parent blocks over all cache groups, the pool has num_blocks " +
                           Number(config.num_blocks - 1));
  }
  // The last token is emitted and never read back, so its KV needs no room.
  const int32_t blocks = CeilDiv(static_cast<int32_t>(total - 1), config.block_size);
  if (blocks > (config.num_blocks - 1) * config.groups[0].blocks_per_parent) {
    return Status::Invalid("prompt of " + Number(prompt) + " tokens and max_new_tokens " +
                           Number(spec.max_new_tokens) + " need " + Number(blocks) +
                           " KV blocks, the pool has num_blocks " + Number(config.num_blocks - 1));
  }
  return Status::Ok();
}

Status ValidateGroup(const SchedulerConfig& config, size_t g) {
  const CacheGroup& group = config.groups[g];
  const std::string name = "groups[" + std::to_string(g) + "]";
  if ((group.kind == GroupKind::kFull) != (g == 0)) {
    return Status::Invalid(name + ".kind: the first group is full, the others are window or state");
  }
  if (group.blocks_per_parent < 1 || group.blocks_per_parent > GroupPool::kMaxBlocksPerParent) {
    return Status::Invalid(name + ".blocks_per_parent must be between 1 and " +
                           Number(GroupPool::kMaxBlocksPerParent));
  }
  const int64_t num_blocks = int64_t{config.num_blocks} * group.blocks_per_parent;
  if (Status status = Within(name + ": num_blocks * blocks_per_parent", num_blocks, 0, kMaxBlocks);
      !status.ok()) {
    return status;
  }
  if (group.kind == GroupKind::kWindow) {
    return Within(name + ".window_tokens", group.window_tokens, 1, kMaxTokens);
  }
  if (group.kind != GroupKind::kState) return Status::Ok();
  if (group.checkpoint_tokens < 1 || group.checkpoint_tokens % config.block_size != 0) {
    return Status::Invalid(name + ".checkpoint_tokens must be a positive multiple of block_size");
  }
  return Status::Ok();
}

Status ValidateGroups(const SchedulerConfig& config) {
  if (config.groups.empty()) return Status::Invalid("groups is empty: the full history needs one");
  for (size_t g = 0; g < config.groups.size(); ++g) {
    if (Status status = ValidateGroup(config, g); !status.ok()) return status;
  }
  return Status::Ok();
}

Status ValidateStore(const SchedulerConfig& config) {
  const StoreConfig& store = config.store;
  if (!store.enabled) return Status::Ok();
  if (config.num_host_blocks == 0) {
    return Status::Invalid("store needs num_host_blocks: what it has arrives in the host tier");
  }
  const struct {
    const char* field;
    int64_t value, most;
  } ranges[] = {
      {"store.max_prefetches", store.max_prefetches, kMaxSeqs},
      {"store.max_puts", store.max_puts, kMaxSeqs},
      {"store.min_blocks", store.min_blocks, kMaxBlocks},
      {"store.prefetch_timeout_us", store.prefetch_timeout_us, kMaxMicroseconds},
      {"store.put_timeout_us", store.put_timeout_us, kMaxMicroseconds},
      {"store.backoff_us", store.backoff_us, kMaxMicroseconds},
      {"store.max_backoff_us", store.max_backoff_us, kMaxMicroseconds},
  };
  for (const auto& [field, value, most] : ranges) {
    if (Status status = Within(field, value, 1, most); !status.ok()) return status;
  }
  return store.max_backoff_us >= store.backoff_us
             ? Status::Ok()
             : Status::Invalid("store.max_backoff_us must be at least store.backoff_us");
}

}  // namespace

Status Validate(const SchedulerConfig& config) {
  const struct {
    const char* field;
    int32_t value, least, most;
  } ranges[] = {
      {"block_size", config.block_size, 1, kMaxBlockSize},
      {"max_num_seqs", config.max_num_seqs, 1, kMaxSeqs},
      {"max_model_len", config.max_model_len, 1, kMaxTokens},
      {"max_batched_tokens", config.max_batched_tokens, 1, kMaxTokens},
      {"verify_width", config.verify_width, 1, kMaxSteps},
      {"max_decode_gap_tokens", config.max_decode_gap_tokens, 1, kMaxTokens},
      {"context_cost_tokens", config.context_cost_tokens, 0, kMaxTokens},
      {"num_host_blocks", config.num_host_blocks, 0, kMaxBlocks},
      {"num_layers", config.num_layers, 1, kMaxSteps},
      {"load_lead_layers", config.load_lead_layers, 0, config.num_layers},
      {"overlap_depth", config.overlap_depth, 0, kMaxSteps},
  };
  for (const auto& [field, value, least, most] : ranges) {
    if (Status status = Within(field, value, least, most); !status.ok()) return status;
  }
  if (config.num_blocks < 2)
    return Status::Invalid("num_blocks must be at least 2: block 0 is padding");
  if (config.num_host_blocks > 0 && !config.enable_prefix_caching) {
    return Status::Invalid(
        "num_host_blocks needs enable_prefix_caching: the host tier holds prefixes");
  }
  if (Status status = ValidateStore(config); !status.ok()) return status;
  if (Status status = ValidateGroups(config); !status.ok()) return status;
  const int64_t decode_tokens = int64_t{config.max_num_seqs} * config.verify_width;
  if (config.max_batched_tokens < decode_tokens) {
    return Status::Invalid("max_batched_tokens " + Number(config.max_batched_tokens) +
                           " is less than max_num_seqs * verify_width = " + Number(decode_tokens) +
                           ": every running request decodes in every step");
  }
  return Status::Ok();
}

Status Validate(const RequestSpec& spec, const SchedulerConfig& config) {
  if (!spec.id.valid()) return Status::Invalid("request_id must not be negative");
  if (Status status = ValidateTokens(spec); !status.ok()) return status;
  if (Status status = Positive("max_new_tokens", spec.max_new_tokens); !status.ok()) return status;
  if (spec.min_new_tokens < 0 || spec.min_new_tokens > spec.max_new_tokens) {
    return Status::Invalid("min_new_tokens must be between 0 and max_new_tokens, got " +
                           Number(spec.min_new_tokens));
  }
  if (spec.priority < -kMaxPriority || spec.priority > kMaxPriority) {
    return Status::Invalid("priority must be within +-" + Number(kMaxPriority) + ", got " +
                           Number(spec.priority));
  }
  return ValidateFit(spec, config);
}

}  // namespace tokenspeed
