// SPDX-License-Identifier: MIT
//
// The counters of requests that ended lately, so that the engine can log a request after its end
// was told. Bounded: the oldest are forgotten.

#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

#include "cc/base/ids.h"
#include "cc/request/request.h"

namespace tokenspeed {

class RecentCounters {
 public:
  explicit RecentCounters(size_t capacity) : capacity_(capacity) {}

  void Add(RequestId id, const RequestCounters& counters) {
    by_id_.insert_or_assign(id, counters);
    order_.push_back(id);
    if (order_.size() <= capacity_) return;
    by_id_.erase(order_.front());
    order_.pop_front();
  }
  std::optional<RequestCounters> Find(RequestId id) const {
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) return std::nullopt;
    return found->second;
  }

 private:
  size_t capacity_;
  std::unordered_map<RequestId, RequestCounters> by_id_;
  std::deque<RequestId> order_;
};

}  // namespace tokenspeed
