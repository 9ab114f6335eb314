// SPDX-License-Identifier: MIT
//
// What changed in the prefix cache, for routers and other readers outside: a block is stored after
// its parent, and removed before it. Only full blocks are told; hashes are the chained block
// hashes. Recorded by the prefix index when enabled, drained once a step by the engine.

#pragma once

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

namespace tokenspeed {

enum class Medium : uint8_t { kDevice = 0, kHost = 1 };

struct BlockStored {
  Medium medium;
  uint64_t hash;
  uint64_t parent_hash;  // the identity's root hash for a first block
  bool has_parent;
  std::vector<int32_t> token_ids;
};
struct BlockRemoved {
  Medium medium;
  uint64_t hash;
};
struct AllBlocksCleared {};  // on every medium

using KvEvent = std::variant<BlockStored, BlockRemoved, AllBlocksCleared>;

class KvEventLog {
 public:
  void Enable() { enabled_ = true; }
  bool enabled() const { return enabled_; }
  void Add(KvEvent event) {
    if (enabled_) events_.push_back(std::move(event));
  }
  std::vector<KvEvent> Take() { return std::exchange(events_, {}); }

 private:
  bool enabled_ = false;
  std::vector<KvEvent> events_;
};

}  // namespace tokenspeed
