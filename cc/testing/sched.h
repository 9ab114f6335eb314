// SPDX-License-Identifier: MIT
//
// A scheduler for tests: built in a sentence, driven by a scripted executor, checked after every
// move.
//   Sched().blocks(8).submit(Ask(1).prompt(20).max_new(4)).run();
// The executor's token is a pure function of (request, position) unless a script says otherwise, so
// a request's output can be foretold whatever happened to it on the way. Test code only.

#pragma once

#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cc/scheduler/scheduler.h"

namespace tokenspeed::testing {

// Tokens of a family: two prompts of one family share the shorter one as prefix.
std::vector<int32_t> Tokens(int family, int32_t count);

class Ask {
 public:
  explicit Ask(int64_t id)
      : spec_{RequestId(id), Tokens(static_cast<int>(id), 4), 4, 0, {}, false, 0, 0, 0} {}
  Ask& prompt(int32_t count) { return prompt(Tokens(static_cast<int>(spec_.id.value()), count)); }
  Ask& prompt(std::vector<int32_t> tokens) { return spec_.token_ids = std::move(tokens), *this; }
  Ask& max_new(int32_t count) { return spec_.max_new_tokens = count, *this; }
  Ask& min_new(int32_t count) { return spec_.min_new_tokens = count, *this; }
  Ask& stop(std::vector<int32_t> ids) { return spec_.stop_token_ids = std::move(ids), *this; }
  Ask& ignore_eos() { return spec_.ignore_eos = true, *this; }
  Ask& priority(int32_t value) { return spec_.priority = value, *this; }
  Ask& salt(int64_t value) { return spec_.cache_salt = value, *this; }
  Ask& adapter(int64_t value) { return spec_.adapter = value, *this; }
  const RequestSpec& spec() const { return spec_; }

 private:
  RequestSpec spec_;
};

class Sched {
 public:
  static constexpr int32_t kEos = 2;

  Sched& blocks(int32_t usable) { return config_.num_blocks = usable + 1, *this; }
  Sched& block_size(int32_t tokens) { return config_.block_size = tokens, *this; }
  Sched& seqs(int32_t count) { return config_.max_num_seqs = count, *this; }
  Sched& model_len(int32_t tokens) { return config_.max_model_len = tokens, *this; }
  Sched& budget(int32_t tokens) { return config_.max_batched_tokens = tokens, *this; }
  Sched& whole_prompts() { return config_.chunked_prefill = false, *this; }
  Sched& depth(int32_t steps) { return config_.overlap_depth = steps, *this; }
  Sched& width(int32_t tokens) { return config_.verify_width = tokens, *this; }
  Sched& verify_overlap() { return config_.verify_overlap = true, *this; }
  Sched& gap(int32_t tokens) { return config_.max_decode_gap_tokens = tokens, *this; }
  Sched& context_cost(int32_t tokens) { return config_.context_cost_tokens = tokens, *this; }
  Sched& role(Role role) { return config_.role = role, *this; }
  Sched& host_blocks(int32_t count) { return config_.num_host_blocks = count, *this; }
  Sched& store() { return config_.store.enabled = true, *this; }
  Sched& layers(int32_t count, int32_t lead) {
    config_.num_layers = count;
    config_.load_lead_layers = lead;
    return *this;
  }
  // A second cache group, and how many blocks of the first and of it fill a parent.
  Sched& window(int32_t tokens, int32_t full_per_parent, int32_t per_parent) {
    config_.groups[0].blocks_per_parent = full_per_parent;
    config_.groups.push_back({GroupKind::kWindow, per_parent, tokens, 0});
    return *this;
  }
  Sched& state(int32_t checkpoint_tokens, int32_t per_parent) {
    config_.groups.push_back({GroupKind::kState, per_parent, 0, checkpoint_tokens});
    return *this;
  }
  Sched& no_cache() { return config_.enable_prefix_caching = false, *this; }

  Scheduler& get();
  Status try_submit(const Ask& ask) { return get().Submit(ask.spec()); }
  Sched& submit(const Ask& ask);  // throws when refused
  // What the model says for a request instead of the default: its output from the first token on.
  Sched& script(int64_t id, std::vector<int32_t> output) {
    return scripts_[id] = std::move(output), *this;
  }
  // How many drafted tokens each decode row gets right.
  Sched& accept(int32_t count) { return accepted_ = count, *this; }

  std::shared_ptr<const Plan> plan();  // stays in flight until settle()
  std::shared_ptr<const Outcome> settle();
  std::shared_ptr<const Plan>
  step();        // plans one, and settles what is more than the overlap depth allows
  Sched& run();  // until nothing is left; throws when it makes no progress
  bool abort(int64_t id);

  const std::vector<int32_t>& output(int64_t id) { return outputs_[id]; }
  Finish finish(int64_t id) const;
  int num_ends(int64_t id) const;
  int32_t cached(int64_t id);  // -1 for a request that nobody knows
  size_t num_in_flight() const { return in_flight_.size(); }
  const SchedulerConfig& config() const { return config_; }

  static int32_t DefaultToken(int64_t id, int64_t output_number);

 private:
  int32_t TokenFor(int64_t id, int64_t output_number) const;

  SchedulerConfig config_{.num_blocks = 65,
                          .block_size = 4,
                          .max_num_seqs = 8,
                          .max_model_len = 128,
                          .max_batched_tokens = 64,
                          .chunked_prefill = true,
                          .overlap_depth = 0,
                          .verify_width = 1,
                          .verify_overlap = false,
                          .max_decode_gap_tokens = 64,
                          .context_cost_tokens = 0,
                          .enable_prefix_caching = true,
                          .eos_token_ids = {kEos},
                          .role = Role::kFused,
                          .num_host_blocks = 0,
                          .groups = {{GroupKind::kFull, 1, 0, 0}},
                          .num_layers = 1,
                          .load_lead_layers = 1,
                          .store = {.enabled = false,
                                    .max_prefetches = 4,
                                    .max_puts = 2,
                                    .min_blocks = 1,
                                    .prefetch_timeout_us = 1'000,
                                    .put_timeout_us = 5'000,
                                    .backoff_us = 10'000,
                                    .max_backoff_us = 40'000}};
  std::unique_ptr<Scheduler> scheduler_;
  std::deque<std::shared_ptr<const Plan>> in_flight_;
  std::map<int64_t, std::vector<int32_t>> scripts_;
  std::map<int64_t, std::vector<int32_t>> outputs_;
  std::map<int64_t, std::vector<Finish>> ends_;
  std::map<int64_t, int32_t> prompt_lens_;
  int32_t accepted_ = 1;
};

// The row of a request in a plan, or -1.
int RowOf(const Plan& plan, int64_t id);

}  // namespace tokenspeed::testing
