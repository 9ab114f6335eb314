// SPDX-License-Identifier: MIT
//
// A random life of a scheduler, as bytes: knobs that make a configuration, and moves. It can be
// made from a seed or from a fuzzer's input, and printed as source text for a regression test. Pure
// values; what the moves do is the random driver's business. Test code only.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/scheduler/config.h"

namespace tokenspeed::testing {

struct Move {
  uint8_t kind;
  uint8_t a;
  uint8_t b;
};

struct Scenario {
  std::vector<uint8_t> knobs;  // read in order by the configuration; missing ones are 0
  std::vector<Move> moves;
};

Scenario RandomScenario(uint64_t seed, int num_moves);
Scenario ScenarioFromBytes(const uint8_t* data, size_t size);

// Every combination of depth, width, role, tier, groups and budgets that `Validate` lets through,
// in sizes small enough that everything is short of something.
SchedulerConfig ConfigFrom(const std::vector<uint8_t>& knobs);

// To paste into a regression test.
std::string ToSource(const Scenario& scenario);

}  // namespace tokenspeed::testing
