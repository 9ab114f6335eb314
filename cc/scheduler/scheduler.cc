// SPDX-License-Identifier: MIT

#include "cc/scheduler/scheduler.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <string>
#include <utility>

#include "cc/base/containers.h"

namespace tokenspeed {
namespace {

// A class of lower priority stands as if it had come this many steps later.
constexpr int64_t kAgeingSteps = 512;
constexpr size_t kMinRecentCounters = 1024;

KvCacheConfig CacheConfig(const SchedulerConfig& config) {
  // With a step in flight, an ended request's row is used for a while longer; a second set of rows
  // lets its successor in without waiting for that.
  const int32_t sets = config.overlap_depth == 0 ? 1 : 2;
  return {.num_blocks = config.num_blocks,
          .block_size = config.block_size,
          .num_slots = config.max_num_seqs * sets,
          .max_blocks_per_seq = CeilDiv(config.max_model_len, config.block_size),
          .enable_prefix_caching = config.enable_prefix_caching,
          .groups = config.groups,
          .num_state_columns = config.verify_width};
}

}  // namespace

Result<std::unique_ptr<Scheduler>> Scheduler::Create(SchedulerConfig config) {
  if (Status status = Validate(config); !status.ok()) return status;
  const std::string blocks = std::to_string(config.num_blocks) + ", num_host_blocks " +
                             std::to_string(config.num_host_blocks);
  try {
    return std::unique_ptr<Scheduler>(new Scheduler(std::move(config)));
  } catch (const std::bad_alloc&) {
    return Status::Invalid("no memory for the tables of num_blocks " + blocks);
  }
}

Scheduler::Scheduler(SchedulerConfig config)
    : config_(std::move(config)),
      cache_(CacheConfig(config_)),
      host_(config_.num_host_blocks, config_.groups),
      ask_health_(config_.store.backoff_us, config_.store.max_backoff_us),
      put_health_(config_.store.backoff_us, config_.store.max_backoff_us),
      recent_(std::max(kMinRecentCounters, 2 * static_cast<size_t>(config_.max_num_seqs))) {
  if (host_.enabled()) cache_.RecordStored();
}

Status Scheduler::Submit(RequestSpec spec) {
  if (Status status = Validate(spec, config_); !status.ok()) return status;
  if (live_.contains(spec.id)) {
    return Status::Invalid("request_id " + std::to_string(spec.id.value()) + " is in use");
  }
  StopRule stop{.max_new_tokens = spec.max_new_tokens,
                .min_new_tokens = spec.min_new_tokens,
                .ignore_eos = spec.ignore_eos,
                .stop_token_ids = std::move(spec.stop_token_ids)};
  auto request = std::make_unique<Request>(spec.id, std::move(spec.token_ids), std::move(stop));
  request->cache_salt = spec.cache_salt;
  request->adapter = spec.adapter;
  request->priority = spec.priority;
  request->key = {next_step_ + spec.priority * kAgeingSteps, next_sequence_++};
  request->counters.submitted_step = next_step_;
  request->counters.prompt_tokens = request->log.num_prompt();
  waiting_.Add(*request);
  live_.emplace(spec.id, std::move(request));
  return Status::Ok();
}

std::optional<Ended> Scheduler::Abort(RequestId id) {
  const auto found = live_.find(id);
  if (found == live_.end()) return std::nullopt;
  Request& request = *found->second;
  const Ended ended{id.value(), Finish::kAbort, request.counters};
  const bool prefetches = std::holds_alternative<Prefetching>(request.state);
  if (prefetches) Cancel(request.transfer, *transfers_.Find(request.transfer));
  if (prefetches || std::holds_alternative<Submitted>(request.state)) {
    waiting_.Remove(request);
    AdvanceAny<Submitted, Prefetching>(request, event::Abort{});
    recent_.Add(id, request.counters);
    live_.erase(found);
    return ended;
  }
  if (std::holds_alternative<Retracted>(request.state)) {
    waiting_.Remove(request);
    Advance<Retracted>(request, event::Abort{});
  } else {
    Depart(
        request,
        LeaveFrom<Prefilling, AwaitingFirstToken, Decoding, Restoring, RemotePrefilling, Sending>(
            request, event::Abort{}));
  }
  MoveToLeaving(request);
  DrainIfDone(request);
  return ended;
}

bool Scheduler::FlushCache() {
  const bool resident = !prefilling_.empty() || !decoding_.empty() || !transferring_.empty();
  if (resident || !tickets_.empty()) return false;
  // What is to be forgotten need not be copied first; only the copies under way are waited for.
  to_store_.clear();
  (void)cache_.TakeStored();
  to_put_.clear();
  if (!transfers_.empty()) return false;
  host_.Clear();
  (void)host_.events().Take();  // the clearing of everything is told once
  cache_.Clear();
  return true;
}

Status Scheduler::SetWeightVersion(int64_t version) {
  if (version < 0) return Status::Invalid("weight version must not be negative");
  if (version == weight_version_) return Status::Ok();
  weight_version_ = version;
  // What the host tier has of other weights would only stand in the way.
  host_.Clear();
  to_store_.clear();
  (void)cache_.TakeStored();
  for (std::vector<Request*>* residents : {&prefilling_, &decoding_, &transferring_}) {
    for (Request* request : *residents) {
      claims_.Move(*request, 0);
      cache_.StopPublishing(*HomeOf(request->state));
    }
  }
  for (Ticket& ticket : tickets_) {
    for (Estate& estate : ticket.estates) cache_.StopPublishing(estate.residence);
  }
  for (auto& [id, ticket] : transfers_) {
    if (ticket.estate) cache_.StopPublishing(*ticket.estate);
  }
  for (const auto& [key, request] : waiting_) request->hit = {};
  return Status::Ok();
}

std::vector<Ended> Scheduler::Pause(PauseMode mode) {
  paused_ = mode;
  if (mode != PauseMode::kAbort) return {};
  std::vector<RequestId> ids;
  ids.reserve(live_.size());
  for (const auto& [id, request] : live_) ids.push_back(id);
  std::ranges::sort(ids);
  std::vector<Ended> ends;
  ends.reserve(ids.size());
  for (const RequestId id : ids) {
    if (const auto ended = Abort(id)) ends.push_back(*ended);
  }
  return ends;
}

Load Scheduler::load() const {
  const int32_t total = cache_.pool().num_total();
  const int32_t free = cache_.pool().num_free();
  const int32_t active = std::min(cache_.num_active(), total - free);
  return {.num_running =
              static_cast<int32_t>(prefilling_.size() + decoding_.size() + transferring_.size()),
          .num_waiting = waiting_.size(),
          .active_blocks = active,
          .cached_blocks = total - free - active,
          .free_blocks = free,
          .total_blocks = total,
          .host_cached_blocks = host_.num_entries(),
          .host_reserved_blocks = host_.num_reserved(),
          .host_free_blocks = host_.num_free()};
}

std::optional<RequestCounters> Scheduler::CountersOf(RequestId id) const {
  const auto found = live_.find(id);
  if (found != live_.end()) return found->second->counters;
  return recent_.Find(id);
}

void Scheduler::EnableKvEvents() {
  cache_.index().events().Enable();
  host_.events().Enable();
}

std::vector<KvEvent> Scheduler::TakeKvEvents() {
  std::vector<KvEvent> events = cache_.index().events().Take();
  std::ranges::move(host_.events().Take(), std::back_inserter(events));
  return events;
}

Content Scheduler::ContentOf(Request& request) {
  if (!config_.enable_prefix_caching) return {request.log.tokens(), {}};
  return {request.log.tokens(), request.log.Hashes(request.root, config_.block_size)};
}

}  // namespace tokenspeed
