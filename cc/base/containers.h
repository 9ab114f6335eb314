// SPDX-License-Identifier: MIT
//
// Small arithmetic and containers that every layer uses. Pure values, any thread.

#pragma once

#include <cstdint>
#include <vector>

namespace tokenspeed {

constexpr int32_t CeilDiv(int32_t value, int32_t divisor) {
  return (value + divisor - 1) / divisor;
}

// Removes the first element equal to `value`, keeping the order of the rest. True when one was
// there.
template <class T>
bool EraseFirst(std::vector<T>& from, const T& value) {
  for (auto it = from.begin(); it != from.end(); ++it) {
    if (*it == value) {
      from.erase(it);
      return true;
    }
  }
  return false;
}

}  // namespace tokenspeed
