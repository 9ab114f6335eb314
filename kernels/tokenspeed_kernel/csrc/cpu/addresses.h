// SPDX-License-Identifier: MIT
//
// How Python hands tensors over: as numbers, whose shapes it has checked. What is left to check are
// the numbers inside tensors that index memory.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_ADDRESSES_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_ADDRESSES_H_

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tokenspeed::cpu {

using Address = uintptr_t;

template <class T>
T* At(Address address) {
  return reinterpret_cast<T*>(address);
}

// Throws when a value is outside [0, limit).
template <class T>
void CheckBelow(const T* values, int64_t count, int64_t limit, const char* what) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= 0 && static_cast<int64_t>(values[i]) < limit) continue;
    throw std::invalid_argument(std::string(what) + "[" + std::to_string(i) + "] is " +
                                std::to_string(values[i]) + ", must be in [0, " +
                                std::to_string(limit) + ")");
  }
}

inline void CheckIds(const void* ids, bool wide, int64_t count, int64_t limit, const char* what) {
  wide ? CheckBelow(static_cast<const int64_t*>(ids), count, limit, what)
       : CheckBelow(static_cast<const int32_t*>(ids), count, limit, what);
}

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_ADDRESSES_H_
