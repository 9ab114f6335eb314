// SPDX-License-Identifier: MIT
//
// Requests that hold nothing, in the order of their keys. Adding, removing and reading the front
// cost O(log n) however long the queue is; nothing here ever walks it.

#pragma once

#include <cstdint>
#include <map>

#include "cc/request/request.h"

namespace tokenspeed {

class WaitingQueue {
 public:
  void Add(Request& request) { by_key_.emplace(request.key, &request); }
  bool Remove(const Request& request) { return by_key_.erase(request.key) == 1; }

  bool empty() const { return by_key_.empty(); }
  int32_t size() const { return static_cast<int32_t>(by_key_.size()); }
  auto begin() const { return by_key_.begin(); }
  auto end() const { return by_key_.end(); }

 private:
  std::map<QueueKey, Request*> by_key_;
};

}  // namespace tokenspeed
