// SPDX-License-Identifier: MIT
//
// A step in flight. It holds what the step still touches although its request moved on: the
// residences of requests that ended or were retracted meanwhile, and the sources of block copies.
// None of that can be reused or published before the ticket is settled, and settling is what
// destroys it.

#pragma once

#include <memory>
#include <vector>

#include "cc/cache/residence.h"
#include "cc/request/request.h"
#include "cc/scheduler/plan.h"

namespace tokenspeed {

struct Row {
  Request* request;
  int32_t query_len;
  bool samples;
  bool decodes;
};

struct Estate {
  Request* request;
  Residence residence;
};

struct Ticket {
  std::shared_ptr<const Plan> plan;
  std::vector<Row> rows;
  std::vector<Estate> estates;
  std::vector<PathPin> copy_sources;
  std::vector<SidePin> side_sources;  // the same in the groups beyond the first

  bool ReturnsBlocks() const {
    return !estates.empty() || !copy_sources.empty() || !side_sources.empty();
  }
};

}  // namespace tokenspeed
