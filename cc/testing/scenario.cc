// SPDX-License-Identifier: MIT

#include "cc/testing/scenario.h"

#include <algorithm>
#include <random>
#include <sstream>

namespace tokenspeed::testing {
namespace {

constexpr int32_t kEos = 2;
constexpr size_t kNumKnobs = 32;

class Knobs {
 public:
  explicit Knobs(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}
  int32_t Pick(int32_t low, int32_t high) {
    const uint8_t byte = at_ < bytes_.size() ? bytes_[at_++] : 0;
    return low + byte % (high - low + 1);
  }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
};

// A window, a state, or both beside the full history, in parents of several blocks; and room for
// them.
void AddGroups(SchedulerConfig& config, Knobs& knobs) {
  config.groups[0].blocks_per_parent = knobs.Pick(1, 3);
  const int32_t kinds = knobs.Pick(1, 3);
  if (kinds != 2)
    config.groups.push_back({GroupKind::kWindow, knobs.Pick(1, 4), knobs.Pick(1, 20), 0});
  if (kinds != 1) {
    config.groups.push_back(
        {GroupKind::kState, knobs.Pick(1, 3), 0, config.block_size * knobs.Pick(1, 3)});
  }
  // A state group has as many working states as a row may keep tokens.
  config.num_blocks = config.num_blocks * 2 + (kinds != 1 ? config.verify_width : 0);
}

}  // namespace

SchedulerConfig ConfigFrom(const std::vector<uint8_t>& bytes) {
  Knobs knobs(bytes);
  SchedulerConfig config{};
  config.overlap_depth = knobs.Pick(0, 3);
  config.block_size = knobs.Pick(1, 5);
  config.max_model_len = 48;
  const int32_t enough = (config.max_model_len + config.block_size - 1) / config.block_size;
  config.num_blocks = 1 + enough + knobs.Pick(0, 24);
  config.max_num_seqs = knobs.Pick(1, 6);
  config.verify_width = knobs.Pick(0, 3) == 0 ? knobs.Pick(2, 4) : 1;
  config.chunked_prefill = knobs.Pick(0, 3) != 0;
  config.max_batched_tokens = config.max_num_seqs * config.verify_width + knobs.Pick(0, 31);
  if (!config.chunked_prefill) config.max_batched_tokens += config.max_model_len;
  config.max_decode_gap_tokens = knobs.Pick(1, 40);
  config.enable_prefix_caching = knobs.Pick(0, 7) != 0;
  config.eos_token_ids = {kEos};
  config.role = static_cast<Role>(std::max(0, knobs.Pick(0, 5) - 3));
  config.num_host_blocks = config.enable_prefix_caching ? std::max(0, knobs.Pick(0, 30) - 10) : 0;
  config.groups = {{GroupKind::kFull, 1, 0, 0}};
  config.verify_overlap = knobs.Pick(0, 1) == 0;
  config.store = {.enabled = config.num_host_blocks > 0 && knobs.Pick(0, 1) == 0,
                  .max_prefetches = knobs.Pick(1, 4),
                  .max_puts = knobs.Pick(1, 3),
                  .min_blocks = knobs.Pick(1, 2),
                  .prefetch_timeout_us = knobs.Pick(10, 250),
                  .put_timeout_us = 300,
                  .backoff_us = knobs.Pick(1, 100),
                  .max_backoff_us = 200};
  config.num_layers = knobs.Pick(1, 4);
  config.load_lead_layers = knobs.Pick(0, config.num_layers);
  if (knobs.Pick(0, 2) == 0) AddGroups(config, knobs);
  config.context_cost_tokens = knobs.Pick(0, 3) == 3 ? knobs.Pick(1, 40) : 0;
  return config;
}

Scenario RandomScenario(uint64_t seed, int num_moves) {
  std::mt19937_64 rng(seed);
  Scenario scenario;
  const auto byte = [&] { return static_cast<uint8_t>(rng()); };
  for (size_t i = 0; i < kNumKnobs; ++i) scenario.knobs.push_back(byte());
  for (int i = 0; i < num_moves; ++i) {
    const uint8_t kind = byte();
    const uint8_t a = byte();
    scenario.moves.push_back({kind, a, byte()});
  }
  return scenario;
}

Scenario ScenarioFromBytes(const uint8_t* data, size_t size) {
  Scenario scenario;
  size_t at = 0;
  while (at < size && at < kNumKnobs) scenario.knobs.push_back(data[at++]);
  for (; at + 3 <= size; at += 3) scenario.moves.push_back({data[at], data[at + 1], data[at + 2]});
  return scenario;
}

std::string ToSource(const Scenario& scenario) {
  std::ostringstream text;
  text << "Scenario{{";
  for (const uint8_t knob : scenario.knobs) text << int{knob} << ", ";
  text << "}, {";
  for (const Move& move : scenario.moves) {
    text << "{" << int{move.kind} << ", " << int{move.a} << ", " << int{move.b} << "}, ";
  }
  text << "}}";
  return text.str();
}

}  // namespace tokenspeed::testing
