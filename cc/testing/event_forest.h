// SPDX-License-Identifier: MIT
//
// What a listener of the KV events believes to be cached, kept by the rules that the events
// promise: on the device a parent is stored before its child and removed after it, nothing is
// stored twice or removed unseen, and a clearing empties every tier. Throws std::logic_error when a
// rule is broken. Test code only.

#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "cc/cache/kv_events.h"

namespace tokenspeed::testing {

class EventForest {
 public:
  void Apply(const std::vector<KvEvent>& events);
  size_t num_device() const { return device_.size(); }
  size_t num_host() const { return host_.size(); }

 private:
  struct Entry {
    uint64_t parent;  // its own hash for a root
    int num_children;
  };
  void Store(const BlockStored& event);
  void Remove(const BlockRemoved& event);

  std::unordered_map<uint64_t, Entry> device_;
  std::set<uint64_t> host_;
};

}  // namespace tokenspeed::testing
