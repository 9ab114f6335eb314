// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/pack.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

namespace tokenspeed::cpu {
namespace {

using Quants = std::array<uint8_t, 256>;

// Writes fields of one block for one of the panel's sixteen rows; advances past all sixteen.
class RowWriter {
 public:
  RowWriter(uint8_t* block, int64_t row) : at_(block), row_(row) {}

  void Bytes(const uint8_t* source, int64_t size) {
    std::memcpy(at_ + row_ * size, source, size);
    at_ += kPanelRows * size;
  }

  // `bits` of each of the quants [first, first + 32 / bits), the first in the lowest bits of the
  // word.
  void Word(const Quants& quants, int64_t first, int bits, int shift) {
    uint32_t word = 0;
    for (int i = 0; i < 32 / bits; ++i) {
      const uint32_t part = (quants[first + i] >> shift) & ((1u << bits) - 1);
      word |= part << (i * bits);
    }
    uint8_t bytes[4];
    std::memcpy(bytes, &word, 4);
    Bytes(bytes, 4);
  }

  void Nibbles(const Quants& quants, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) Word(quants, first + i, 4, 0);
  }

 private:
  uint8_t* at_;
  int64_t row_;
};

// The 32 quants of a q4 or q5 block: low nibbles of 16 bytes, then their high nibbles; fifth bits
// apart.
Quants SmallBlockQuants(const uint8_t* nibbles, const uint8_t* fifth_bits) {
  Quants quants{};
  for (int i = 0; i < 16; ++i) {
    quants[i] = nibbles[i] & 15;
    quants[i + 16] = nibbles[i] >> 4;
  }
  if (fifth_bits != nullptr) {
    for (int i = 0; i < 32; ++i) quants[i] |= ((fifth_bits[i / 8] >> (i % 8)) & 1) << 4;
  }
  return quants;
}

// num_scales: 1 (d) or 2 (d, m) half floats at the start of the source block.
void PackSmallBlock(const uint8_t* source, int num_scales, bool fifth, RowWriter out) {
  const uint8_t* const after_scales = source + 2 * num_scales;
  const Quants quants =
      SmallBlockQuants(after_scales + (fifth ? 4 : 0), fifth ? after_scales : nullptr);
  for (int i = 0; i < num_scales; ++i) out.Bytes(source + 2 * i, 2);
  out.Nibbles(quants, 0, 32);
  if (fifth) out.Word(quants, 0, 1, 4);
}

void PackQ8Block(const uint8_t* source, RowWriter out) {
  out.Bytes(source, 2);
  for (int i = 0; i < 32; ++i) out.Bytes(source + 2 + i, 1);
}

// 128 bytes in four groups of 32: low nibbles are one sub-block of 32, high nibbles the next.
void PackKBlock(const uint8_t* source, bool fifth, RowWriter out) {
  const uint8_t* const packed_scales = source + 4;
  const uint8_t* const fifth_bits = source + 16;
  const uint8_t* const nibbles = source + (fifth ? 48 : 16);
  Quants quants{};
  for (int sub = 0; sub < 8; ++sub) {
    for (int i = 0; i < 32; ++i) {
      const uint8_t byte = nibbles[sub / 2 * 32 + i];
      quants[sub * 32 + i] = sub % 2 == 0 ? byte & 15 : byte >> 4;
      if (fifth) quants[sub * 32 + i] |= ((fifth_bits[i] >> sub) & 1) << 4;
    }
  }
  out.Bytes(source, 2);
  out.Bytes(source + 2, 2);
  for (int sub = 0; sub < 8; ++sub) {
    const uint8_t* const s = packed_scales;
    uint8_t scale, minimum;
    if (sub < 4) {
      scale = s[sub] & 63;
      minimum = s[sub + 4] & 63;
    } else {
      scale = static_cast<uint8_t>((s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4);
      minimum = static_cast<uint8_t>((s[sub + 4] >> 4) | (s[sub] >> 6) << 4);
    }
    out.Bytes(&scale, 1);
    out.Bytes(&minimum, 1);
    out.Nibbles(quants, sub * 32, 32);
    if (fifth) out.Word(quants, sub * 32, 1, 4);
  }
}

// Two halves of 128 values: 64 bytes of low nibbles and 32 bytes with four times two high bits
// each.
void PackQ6KBlock(const uint8_t* source, RowWriter out) {
  Quants quants{};
  for (int half = 0; half < 2; ++half) {
    const uint8_t* const low = source + half * 64;
    const uint8_t* const high = source + 128 + half * 32;
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < 32; ++i) {
        const uint8_t byte = low[quarter % 2 * 32 + i];
        const int nibble = quarter < 2 ? byte & 15 : byte >> 4;
        quants[half * 128 + quarter * 32 + i] =
            static_cast<uint8_t>(nibble | ((high[i] >> (2 * quarter)) & 3) << 4);
      }
    }
  }
  out.Bytes(source + 208, 2);
  for (int sub = 0; sub < 16; ++sub) {
    out.Bytes(source + 192 + sub, 1);
    out.Nibbles(quants, sub * 16, 16);
    out.Word(quants, sub * 16, 2, 4);
  }
}

// A float32 scale, then the block's values of one byte each.
void PackBytesBlock(const uint8_t* source, int64_t num_values, RowWriter out) {
  out.Bytes(source, 4);
  for (int64_t i = 0; i < num_values; ++i) out.Bytes(source + 4 + i, 1);
}

// A float32 scale, a zero point, then low nibbles for the first half of the values and high ones
// for the second.
void PackInt4Block(const uint8_t* source, int64_t num_values, RowWriter out) {
  const uint8_t* const nibbles = source + 5;
  Quants quants{};
  for (int64_t i = 0; i < num_values / 2; ++i) {
    quants[i] = nibbles[i] & 15;
    quants[num_values / 2 + i] = nibbles[i] >> 4;
  }
  out.Bytes(source, 4);
  out.Bytes(source + 4, 1);
  out.Nibbles(quants, 0, num_values);
}

void PackBlock(WeightFormat format, const uint8_t* source, RowWriter out) {
  switch (format) {
    case WeightFormat::kF32:
      return out.Bytes(source, 4);
    case WeightFormat::kBf16:
    case WeightFormat::kF16:
      return out.Bytes(source, 2);
    case WeightFormat::kQ4_0:
      return PackSmallBlock(source, 1, false, out);
    case WeightFormat::kQ4_1:
      return PackSmallBlock(source, 2, false, out);
    case WeightFormat::kQ5_0:
      return PackSmallBlock(source, 1, true, out);
    case WeightFormat::kQ5_1:
      return PackSmallBlock(source, 2, true, out);
    case WeightFormat::kQ8_0:
      return PackQ8Block(source, out);
    case WeightFormat::kQ4K:
      return PackKBlock(source, false, out);
    case WeightFormat::kQ5K:
      return PackKBlock(source, true, out);
    case WeightFormat::kQ6K:
      return PackQ6KBlock(source, out);
    case WeightFormat::kFp8x32:
    case WeightFormat::kFp8x128:
    case WeightFormat::kInt8x32:
    case WeightFormat::kInt8x128:
      return PackBytesBlock(source, Info(format).block_values, out);
    case WeightFormat::kInt4x32:
    case WeightFormat::kInt4x128:
      return PackInt4Block(source, Info(format).block_values, out);
  }
}

struct PackJob {
  WeightFormat format;
  const uint8_t* source;
  int64_t n, k;
  uint8_t* packed;
};

void PackPanels(void* context, int64_t begin, int64_t end) {
  const PackJob& job = *static_cast<const PackJob*>(context);
  const FormatInfo info = Info(job.format);
  const int64_t num_blocks = job.k / info.block_values;
  const int64_t panel_bytes = num_blocks * info.panel_bytes;
  for (int64_t panel = begin; panel < end; ++panel) {
    uint8_t* const out = job.packed + panel * panel_bytes;
    const int64_t num_rows = std::min(kPanelRows, job.n - panel * kPanelRows);
    // Zero bytes are zero weights in every format: all scales and minima are 0.
    if (num_rows < kPanelRows) std::memset(out, 0, panel_bytes);
    for (int64_t row = 0; row < num_rows; ++row) {
      const uint8_t* source =
          job.source + (panel * kPanelRows + row) * num_blocks * info.source_bytes;
      for (int64_t block = 0; block < num_blocks; ++block, source += info.source_bytes) {
        PackBlock(job.format, source, RowWriter(out + block * info.panel_bytes, row));
      }
    }
  }
}

}  // namespace

void PackWeight(WeightFormat format, const uint8_t* source, int64_t n, int64_t k, uint8_t* packed) {
  PackJob job{format, source, n, k, packed};
  const int64_t num_panels = (n + kPanelRows - 1) / kPanelRows;
  ThreadPool::Global().ParallelFor(num_panels, 8, &PackPanels, &job);
}

void AdviseHugePages(uint8_t* buffer, int64_t num_bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + static_cast<uintptr_t>(num_bytes)) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace tokenspeed::cpu
