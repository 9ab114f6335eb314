// SPDX-License-Identifier: MIT
//
// Plays a `Scenario`: submits, plans, results, aborts, flushes, pauses, new weights, transfers that
// go wrong, and calls that must be refused. Every plan runs on the device model. After each move it
// checks conservation and the other invariants, one terminal event a request, that every token is
// emitted once, that hits are ground truth and settled, that budgets are kept, that KV events tell
// a consistent story, that a mirror fed the same events makes the same plans though it heard none
// of the refused calls, and that work moves. A failing scenario is shrunk to what matters. The
// tests, the command line and the fuzz target share it. Test code only.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cc/scheduler/plan.h"
#include "cc/testing/scenario.h"

namespace tokenspeed::testing {

// A bug that is planted between the scheduler and the device, to prove that the driver sees one.
enum class Fault : uint8_t {
  kNone,
  kForgetsCopies,        // the plan's block copies are lost
  kPublishesTooEarly,    // a step's blocks are hit as though it had settled, which it never did
  kMirrorMissesAborts,   // the twin is told less
  kForgetsTableUpdates,  // every third plan's deltas are lost
};

struct Report {
  std::optional<std::string> failure;
  int failed_move = -1;
  int64_t num_steps = 0;
  int64_t num_tokens = 0;
  int64_t num_retractions = 0;
  int64_t num_cached_tokens = 0;
  int64_t num_transfers = 0;
  int64_t num_refusals = 0;
  int64_t num_steps_behind_loads = 0;
  StoreCounters store = {};
};

// Replays on two schedulers side by side; the second one only has to make the same plans.
Report Replay(const Scenario& scenario, Fault fault);

// Removes moves and lowers numbers as long as the scenario still fails in the same way.
Scenario Shrink(Scenario scenario, Fault fault);

}  // namespace tokenspeed::testing
