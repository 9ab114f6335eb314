// SPDX-License-Identifier: MIT
//
// How weights lie in memory on a CPU: the "cpu_rows16" layout. Sixteen consecutive output rows form
// a panel; panels follow each other, the last one padded with rows of zeros. Within a panel, K runs
// in blocks, and every field of a block holds its sixteen rows side by side, so that one vector
// register serves sixteen outputs. Quants keep the bits of their GGUF format; k-quant sub-scales
// take 8 bits.
//
//   format    block   fields of a block, each for 16 rows
//   f32/16    1       value
//   q4_0      32      d f16 | 4 words of 8 nibbles
//   q4_1      32      d f16, m f16 | 4 words of 8 nibbles
//   q5_0/1    32      as q4_0/1 | 1 word of fifth bits
//   q8_0      32      d f16 | 32 int8
//   q4_k      256     d f16, dmin f16 | 8 x (scale u8, min u8, 4 words of 8 nibbles)
//   q5_k      256     as q4_k, each sub-block followed by 1 word of fifth bits
//   q6_k      256     d f16 | 16 x (scale i8, 2 words of 8 low nibbles, 1 word of 16 x 2 high bits)
//   fp8       32, 128 scale f32 | e4m3 values
//   int8      32, 128 scale f32 | int8 values
//   int4      32, 128 scale f32, zero u8 | words of 8 nibbles

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_WEIGHT_FORMAT_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_WEIGHT_FORMAT_H_

#include <cstdint>

namespace tokenspeed::cpu {

constexpr int64_t kPanelRows = 16;

enum class WeightFormat : int32_t {
  kF32,
  kBf16,
  kF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4K,
  kQ5K,
  kQ6K,
  kFp8x32,
  kFp8x128,
  kInt8x32,
  kInt8x128,
  kInt4x32,
  kInt4x128,
};

struct FormatInfo {
  int64_t block_values;  // along K
  int64_t source_bytes;  // of one row's block as it comes: see quant/packed.py; or a dense element
  int64_t panel_bytes;   // of sixteen rows' block in the packed layout
};

constexpr FormatInfo Info(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return {1, 4, 64};
    case WeightFormat::kBf16:
    case WeightFormat::kF16:
      return {1, 2, 32};
    case WeightFormat::kQ4_0:
      return {32, 18, 32 + 256};
    case WeightFormat::kQ4_1:
      return {32, 20, 64 + 256};
    case WeightFormat::kQ5_0:
      return {32, 22, 32 + 256 + 64};
    case WeightFormat::kQ5_1:
      return {32, 24, 64 + 256 + 64};
    case WeightFormat::kQ8_0:
      return {32, 34, 32 + 512};
    case WeightFormat::kQ4K:
      return {256, 144, 64 + 8 * (32 + 256)};
    case WeightFormat::kQ5K:
      return {256, 176, 64 + 8 * (32 + 256 + 64)};
    case WeightFormat::kQ6K:
      return {256, 210, 32 + 16 * (16 + 128 + 64)};
    case WeightFormat::kFp8x32:
    case WeightFormat::kInt8x32:
      return {32, 4 + 32, 64 + 512};
    case WeightFormat::kFp8x128:
    case WeightFormat::kInt8x128:
      return {128, 4 + 128, 64 + 2048};
    case WeightFormat::kInt4x32:
      return {32, 4 + 1 + 16, 64 + 16 + 256};
    case WeightFormat::kInt4x128:
      return {128, 4 + 1 + 64, 64 + 16 + 1024};
  }
  return {1, 0, 0};
}

constexpr int64_t PanelBytes(WeightFormat format, int64_t k) {
  return k / Info(format).block_values * Info(format).panel_bytes;
}

constexpr int64_t PackedBytes(WeightFormat format, int64_t n, int64_t k) {
  return (n + kPanelRows - 1) / kPanelRows * PanelBytes(format, k);
}

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_WEIGHT_FORMAT_H_
