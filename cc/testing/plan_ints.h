// SPDX-License-Identifier: MIT
//
// All of a plan as numbers, to compare two of them. Test code only.

#pragma once

#include <cstdint>
#include <vector>

#include "cc/scheduler/plan.h"

namespace tokenspeed::testing {

inline std::vector<int64_t> AsInts(const Plan& plan) {
  std::vector<int64_t> all = {plan.step_id, plan.num_decode_rows};
  const auto add = [&](const auto& values) {
    all.push_back(static_cast<int64_t>(values.size()));
    all.insert(all.end(), values.begin(), values.end());
  };
  const auto add_copies = [&](const std::vector<BlockCopy>& copies) {
    for (const BlockCopy& copy : copies) add(std::vector{copy.from, copy.to});
  };
  const auto add_updates = [&](const std::vector<TableUpdate>& updates) {
    for (const TableUpdate& u : updates) add(std::vector{u.slot, u.column, u.block});
  };
  add(plan.request_ids), add(plan.slots), add(plan.query_lens), add(plan.context_lens);
  add(plan.context_slack), add(plan.samples), add(plan.prompt_token_ids), add(plan.new_slots);
  add(plan.new_slot_request_ids), add_copies(plan.block_copies);
  add_updates(plan.table_updates);
  for (const LoadWait& w : plan.load_waits) add(std::vector{w.transfer_id, w.layers_done});
  for (const GroupPlan& group : plan.groups) {
    add(group.state_columns);
    add_copies(group.copies), add_copies(group.saves), add_updates(group.table_updates);
  }
  return all;
}

}  // namespace tokenspeed::testing
