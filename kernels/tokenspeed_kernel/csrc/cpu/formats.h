// SPDX-License-Identifier: MIT
//
// Reading packed weights: a `Format` walks one panel block (sixteen rows, see weight_format.h) and
// gives the weights of one k after the other as a Vec. Each weight is the value that the format's
// specification defines, rounded once. Begin() reads what holds for the block, Group() what holds
// for kGroup consecutive k, Weight() one k. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_FORMATS_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_FORMATS_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/simd.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/weight_format.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

static_assert(kLanes == kPanelRows);

TS_INLINE Vec ReadHalf(const uint8_t* p) {
  return LoadFloat16(reinterpret_cast<const uint16_t*>(p));
}

template <WeightFormat kFormat>
struct Format;

// A dense element a row; kGroup = kBlock = 1, so any K will do.
struct DenseFormat {
  static constexpr int kBlock = 1;
  static constexpr int kGroup = 1;
  TS_INLINE void Begin(const uint8_t*) {}
  TS_INLINE void Group(const uint8_t*, int) {}
};

template <>
struct Format<WeightFormat::kF32> : DenseFormat {
  TS_INLINE Vec Weight(const uint8_t* p, int, int) const {
    return Load(reinterpret_cast<const float*>(p));
  }
};

template <>
struct Format<WeightFormat::kBf16> : DenseFormat {
  TS_INLINE Vec Weight(const uint8_t* p, int, int) const {
    return LoadBfloat16(reinterpret_cast<const uint16_t*>(p));
  }
};

template <>
struct Format<WeightFormat::kF16> : DenseFormat {
  TS_INLINE Vec Weight(const uint8_t* p, int, int) const { return ReadHalf(p); }
};

template <>
struct Format<WeightFormat::kQ4_0> {
  static constexpr int kBlock = 32;
  static constexpr int kGroup = 8;
  Vec d;
  IVec word;
  TS_INLINE void Begin(const uint8_t* p) { d = ReadHalf(p); }
  TS_INLINE void Group(const uint8_t* p, int group) { word = LoadInt(p + 32 + 64 * group); }
  TS_INLINE Vec Weight(const uint8_t*, int, int i) const {
    return Mul(NibbleToFloat<-8>(ShiftRight(word, 4 * i)), d);
  }
};

template <>
struct Format<WeightFormat::kQ4_1> {
  static constexpr int kBlock = 32;
  static constexpr int kGroup = 8;
  Vec d, m;
  IVec word;
  TS_INLINE void Begin(const uint8_t* p) {
    d = ReadHalf(p);
    m = ReadHalf(p + 32);
  }
  TS_INLINE void Group(const uint8_t* p, int group) { word = LoadInt(p + 64 + 64 * group); }
  TS_INLINE Vec Weight(const uint8_t*, int, int i) const {
    return Fma(NibbleToFloat<0>(ShiftRight(word, 4 * i)), d, m);
  }
};

// Bit `i` of every lane of `bits` as 0 or 16.
TS_INLINE IVec FifthBit(const IVec& bits, int i) {
  return And(i < 4 ? ShiftLeft(bits, 4 - i) : ShiftRight(bits, i - 4), 16);
}
TS_INLINE Vec FiveBitsToFloat(const IVec& word, const IVec& fifth, int i) {
  return ToFloat(Or(And(ShiftRight(word, 4 * i), 15), FifthBit(fifth, i)));
}

template <>
struct Format<WeightFormat::kQ5_0> {
  static constexpr int kBlock = 32;
  static constexpr int kGroup = 8;
  Vec d;
  IVec word, fifth;
  TS_INLINE void Begin(const uint8_t* p) { d = ReadHalf(p); }
  TS_INLINE void Group(const uint8_t* p, int group) {
    word = LoadInt(p + 32 + 64 * group);
    fifth = ShiftRight(LoadInt(p + 32 + 256), 8 * group);
  }
  TS_INLINE Vec Weight(const uint8_t*, int, int i) const {
    return Mul(Sub(FiveBitsToFloat(word, fifth, i), Broadcast(16.0f)), d);
  }
};

template <>
struct Format<WeightFormat::kQ5_1> {
  static constexpr int kBlock = 32;
  static constexpr int kGroup = 8;
  Vec d, m;
  IVec word, fifth;
  TS_INLINE void Begin(const uint8_t* p) {
    d = ReadHalf(p);
    m = ReadHalf(p + 32);
  }
  TS_INLINE void Group(const uint8_t* p, int group) {
    word = LoadInt(p + 64 + 64 * group);
    fifth = ShiftRight(LoadInt(p + 64 + 256), 8 * group);
  }
  TS_INLINE Vec Weight(const uint8_t*, int, int i) const {
    return Fma(FiveBitsToFloat(word, fifth, i), d, m);
  }
};

template <>
struct Format<WeightFormat::kQ8_0> {
  static constexpr int kBlock = 32;
  static constexpr int kGroup = 8;
  Vec d;
  TS_INLINE void Begin(const uint8_t* p) { d = ReadHalf(p); }
  TS_INLINE void Group(const uint8_t*, int) {}
  TS_INLINE Vec Weight(const uint8_t* p, int group, int i) const {
    return Mul(LoadInt8(reinterpret_cast<const int8_t*>(p + 32 + 16 * (8 * group + i))), d);
  }
};

// q4_k and q5_k: d * scale * quant - dmin * min, scale and min for every 32 values.
template <bool kFifth>
struct KFormat {
  static constexpr int kBlock = 256;
  static constexpr int kGroup = 8;
  static constexpr int kSubBytes = 32 + 256 + (kFifth ? 64 : 0);
  Vec d, dmin, scale, minimum;
  IVec word, fifth;
  TS_INLINE void Begin(const uint8_t* p) {
    d = ReadHalf(p);
    dmin = Sub(Zero(), ReadHalf(p + 32));
    scale = minimum = d;
  }
  TS_INLINE void Group(const uint8_t* p, int group) {
    const uint8_t* const sub = p + 64 + group / 4 * kSubBytes;
    if (group % 4 == 0) {
      scale = Mul(d, LoadUint8(sub));
      minimum = Mul(dmin, LoadUint8(sub + 16));
    }
    word = LoadInt(sub + 32 + 64 * (group % 4));
    if constexpr (kFifth) fifth = ShiftRight(LoadInt(sub + 32 + 256), 8 * (group % 4));
  }
  TS_INLINE Vec Weight(const uint8_t*, int, int i) const {
    if constexpr (kFifth) {
      return Fma(FiveBitsToFloat(word, fifth, i), scale, minimum);
    } else {
      return Fma(NibbleToFloat<0>(ShiftRight(word, 4 * i)), scale, minimum);
    }
  }
};
template <>
struct Format<WeightFormat::kQ4K> : KFormat<false> {};
template <>
struct Format<WeightFormat::kQ5K> : KFormat<true> {};

template <>
struct Format<WeightFormat::kQ6K> {
  static constexpr int kBlock = 256;
  static constexpr int kGroup = 8;
  static constexpr int kSubBytes = 16 + 128 + 64;
  Vec d, scale;
  IVec word, high;
  TS_INLINE void Begin(const uint8_t* p) { scale = d = ReadHalf(p); }
  TS_INLINE void Group(const uint8_t* p, int group) {
    const uint8_t* const sub = p + 32 + group / 2 * kSubBytes;
    if (group % 2 == 0) scale = Mul(d, LoadInt8(reinterpret_cast<const int8_t*>(sub)));
    word = LoadInt(sub + 16 + 64 * (group % 2));
    high = ShiftRight(LoadInt(sub + 16 + 128), 16 * (group % 2));
  }
  TS_INLINE Vec Weight(const uint8_t*, int, int i) const {
    const IVec low = And(ShiftRight(word, 4 * i), 15);
    const IVec two = And(i < 2 ? ShiftLeft(high, 4 - 2 * i) : ShiftRight(high, 2 * i - 4), 48);
    return Mul(Sub(ToFloat(Or(low, two)), Broadcast(32.0f)), scale);
  }
};

// A float32 scale for every kValues, as checkpoints quantized for GPUs have it.
template <int kValues>
struct Fp8Format {
  static constexpr int kBlock = kValues;
  static constexpr int kGroup = 8;
  Vec scale;
  TS_INLINE void Begin(const uint8_t* p) {
    scale = Mul(Load(reinterpret_cast<const float*>(p)), Broadcast(kFp8Unit));
  }
  TS_INLINE void Group(const uint8_t*, int) {}
  TS_INLINE Vec Weight(const uint8_t* p, int group, int i) const {
    return Mul(LoadFp8(p + 64 + 16 * (8 * group + i)), scale);
  }
};
template <>
struct Format<WeightFormat::kFp8x32> : Fp8Format<32> {};
template <>
struct Format<WeightFormat::kFp8x128> : Fp8Format<128> {};

template <int kValues>
struct Int8Format {
  static constexpr int kBlock = kValues;
  static constexpr int kGroup = 8;
  Vec scale;
  TS_INLINE void Begin(const uint8_t* p) { scale = Load(reinterpret_cast<const float*>(p)); }
  TS_INLINE void Group(const uint8_t*, int) {}
  TS_INLINE Vec Weight(const uint8_t* p, int group, int i) const {
    return Mul(LoadInt8(reinterpret_cast<const int8_t*>(p + 64 + 16 * (8 * group + i))), scale);
  }
};
template <>
struct Format<WeightFormat::kInt8x32> : Int8Format<32> {};
template <>
struct Format<WeightFormat::kInt8x128> : Int8Format<128> {};

template <int kValues>
struct Int4Format {
  static constexpr int kBlock = kValues;
  static constexpr int kGroup = 8;
  Vec scale, zero;
  IVec word;
  TS_INLINE void Begin(const uint8_t* p) {
    scale = Load(reinterpret_cast<const float*>(p));
    zero = LoadUint8(p + 64);
  }
  TS_INLINE void Group(const uint8_t* p, int group) { word = LoadInt(p + 80 + 64 * group); }
  TS_INLINE Vec Weight(const uint8_t*, int, int i) const {
    return Mul(Sub(NibbleToFloat<0>(ShiftRight(word, 4 * i)), zero), scale);
  }
};
template <>
struct Format<WeightFormat::kInt4x32> : Int4Format<32> {};
template <>
struct Format<WeightFormat::kInt4x128> : Int4Format<128> {};

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_FORMATS_H_
