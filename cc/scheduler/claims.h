// SPDX-License-Identifier: MIT
//
// Which block a resident request is about to publish next. A waiting request whose next block is
// claimed waits for it instead of computing it again. One claim a request is enough: another
// request that shares more of the prompt matches everything published so far, so it always meets
// the claim at the front. A claim dies with its holder's progress or departure, so whoever waits on
// it is looked at again.

#pragma once

#include <cstdint>
#include <unordered_map>

#include "cc/request/request.h"

namespace tokenspeed {

class Claims {
 public:
  // Moves the claim of `request` to `hash`; 0 gives it up. The first holder of a hash keeps it.
  void Move(Request& request, uint64_t hash) {
    if (request.claimed != 0) holders_.erase(request.claimed);
    request.claimed = hash != 0 && holders_.emplace(hash, request.id).second ? hash : 0;
  }
  bool IsClaimed(uint64_t hash) const { return holders_.contains(hash); }
  size_t size() const { return holders_.size(); }

 private:
  std::unordered_map<uint64_t, RequestId> holders_;
};

}  // namespace tokenspeed
