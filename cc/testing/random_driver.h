// SPDX-License-Identifier: MIT
//
// Random lives of a scheduler. A `Scenario` is bytes: a configuration and a list of moves (submit,
// plan, settle, abort, flush, new weights). Replaying one runs every plan on the device model and
// checks, after each move: conservation and the other invariants, one terminal event a request,
// that the emitted tokens are the sampled ones, and that work never stands still. A failing
// scenario is shrunk to the moves that matter. The fuzz target and the tests share it; two replays
// of one scenario are compared for equal plans.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

struct Report {
  std::optional<std::string> failure;
  int failed_move = -1;
  int64_t num_steps = 0;
  int64_t num_retractions = 0;
  int64_t num_cached_tokens = 0;
};

// Replays on two schedulers side by side; the second one only has to make the same plans.
Report Replay(const Scenario& scenario);

// Removes moves as long as the scenario still fails.
Scenario Shrink(Scenario scenario);

// As source text, to paste into a regression test.
std::string ToSource(const Scenario& scenario);

}  // namespace tokenspeed::testing
