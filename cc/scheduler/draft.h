// SPDX-License-Identifier: MIT
//
// A step being built: its rows so far and what is left of its budget. Private to the scheduler.

#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "cc/scheduler/plan.h"
#include "cc/scheduler/scheduler.h"
#include "cc/scheduler/ticket.h"

namespace tokenspeed {

struct Scheduler::Draft {
  std::shared_ptr<Plan> plan = std::make_shared<Plan>();
  std::vector<Row> rows;
  std::vector<PathPin> copy_sources;
  std::vector<SidePin> side_sources;
  int32_t num_tokens = 0;            // of all rows
  int32_t prefill_budget = 0;        // tokens that prefill rows may still take
  bool has_running = false;          // somebody decodes in this step or waits for a later one
  int64_t prompts_since_decode = 0;  // work on prompts since the step that one of them had last
  // What prompts may still cost, in tokens without context.
  int64_t prefill_work = std::numeric_limits<int64_t>::max();
};

}  // namespace tokenspeed
