// SPDX-License-Identifier: MIT

#pragma once

#include <cstddef>
#include <cstdint>

#include "cc/scheduler/plan.h"

namespace tokenspeed::testing {

// What the prompts of a step cost in the decode gap, counted token by token: 1, and 1 more for
// every `context_cost` tokens before it. A chunk of one token goes whatever its context.
inline int64_t PromptWork(const Plan& plan, int64_t context_cost) {
  int64_t work = 0;
  for (auto row = static_cast<size_t>(plan.num_decode_rows); row < plan.query_lens.size(); ++row) {
    const int64_t length = plan.query_lens[row];
    work += length;
    if (length == 1 || context_cost == 0) continue;
    int64_t halves = 0;  // token i attends to all before it and, by half, to itself
    for (int64_t i = 0; i < length; ++i) halves += 2 * (plan.context_lens[row] + i) + 1;
    work += halves / (2 * context_cost);
  }
  return work;
}

}  // namespace tokenspeed::testing
