// SPDX-License-Identifier: MIT
//
// What models ask of torch between kernels, with its bits: for recordings, which torch's own
// operations cannot be part of.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_COPIES_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_COPIES_H_

#include <cstdint>
#include <cstring>

#include "kernels/tokenspeed_kernel/csrc/cpu/addresses.h"

namespace tokenspeed::cpu {

inline void Clear(Address at, int64_t num_bytes) { std::memset(At<uint8_t>(at), 0, num_bytes); }

// Strides count bytes. Source and target do not overlap.
inline void CopyRows(Address source, int64_t source_stride, Address target, int64_t target_stride,
                     int64_t num_rows, int64_t row_bytes) {
  for (int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(At<uint8_t>(target) + row * target_stride,
                At<const uint8_t>(source) + row * source_stride, row_bytes);
  }
}

// Of contiguous vectors.
inline void Add(Address x, Address y, Address out, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    At<float>(out)[i] = At<const float>(x)[i] + At<const float>(y)[i];
}

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_COPIES_H_
