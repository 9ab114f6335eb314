// SPDX-License-Identifier: MIT
//
// Sixteen float lanes and what kernels do with them, for the instruction set that the including
// file is compiled for. A `Vec` is one AVX-512 register, two AVX2 registers or four registers of
// 128 bits; the lanes, the order of operations and therefore the kernels are the same everywhere.
//
// Included only by kernels_avx512.cc, kernels_avx2.cc and kernels_baseline.cc, each of which
// defines TS_CPU_ISA_NAMESPACE. Everything here has internal linkage, and these files use no C++
// library: an inline function compiled with wide instructions must never be the copy that the
// linker keeps for all.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_SIMD_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_SIMD_H_

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
// GCC 12 takes the deliberately undefined pass-through operands of its own AVX-512 intrinsics for
// bugs.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define TS_INLINE inline __attribute__((always_inline))

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kRegs = 1;
#elif defined(__AVX2__)
constexpr int kRegs = 2;
#else
constexpr int kRegs = 4;
#endif
constexpr int kRegLanes = kLanes / kRegs;

typedef float FloatReg __attribute__((vector_size(kRegLanes * 4), may_alias));
typedef int32_t IntReg __attribute__((vector_size(kRegLanes * 4), may_alias));
typedef uint32_t UintReg __attribute__((vector_size(kRegLanes * 4), may_alias));
typedef float UnalignedFloatReg __attribute__((vector_size(kRegLanes * 4), may_alias, aligned(1)));
typedef int32_t UnalignedIntReg __attribute__((vector_size(kRegLanes * 4), may_alias, aligned(1)));

struct Vec {
  FloatReg r[kRegs];
};
struct IVec {
  UintReg r[kRegs];
};

#define TS_EACH_REG for (int i = 0; i < kRegs; ++i)

TS_INLINE Vec Load(const float* p) {
  Vec v;
  TS_EACH_REG v.r[i] = *reinterpret_cast<const UnalignedFloatReg*>(p + i * kRegLanes);
  return v;
}
TS_INLINE void Store(float* p, const Vec& v) {
  TS_EACH_REG* reinterpret_cast<UnalignedFloatReg*>(p + i * kRegLanes) = v.r[i];
}
TS_INLINE Vec Broadcast(float x) {
  Vec v;
#if defined(__AVX512F__)
  TS_EACH_REG v.r[i] = _mm512_set1_ps(x);
#elif defined(__AVX2__)
  TS_EACH_REG v.r[i] = _mm256_set1_ps(x);
#else
  TS_EACH_REG v.r[i] = FloatReg{x, x, x, x};
#endif
  return v;
}
TS_INLINE Vec Zero() { return Broadcast(0.0f); }
TS_INLINE Vec Add(const Vec& a, const Vec& b) {
  Vec v;
  TS_EACH_REG v.r[i] = a.r[i] + b.r[i];
  return v;
}
TS_INLINE Vec Sub(const Vec& a, const Vec& b) {
  Vec v;
  TS_EACH_REG v.r[i] = a.r[i] - b.r[i];
  return v;
}
TS_INLINE Vec Mul(const Vec& a, const Vec& b) {
  Vec v;
  TS_EACH_REG v.r[i] = a.r[i] * b.r[i];
  return v;
}
TS_INLINE Vec Div(const Vec& a, const Vec& b) {
  Vec v;
  TS_EACH_REG v.r[i] = a.r[i] / b.r[i];
  return v;
}
// a * b + c, rounded once where the machine can.
TS_INLINE Vec Fma(const Vec& a, const Vec& b, const Vec& c) {
  Vec v;
#if defined(__AVX512F__)
  TS_EACH_REG v.r[i] = _mm512_fmadd_ps(a.r[i], b.r[i], c.r[i]);
#elif defined(__AVX2__)
  TS_EACH_REG v.r[i] = _mm256_fmadd_ps(a.r[i], b.r[i], c.r[i]);
#else
  TS_EACH_REG v.r[i] = a.r[i] * b.r[i] + c.r[i];
#endif
  return v;
}
TS_INLINE Vec Max(const Vec& a, const Vec& b) {
  Vec v;
  TS_EACH_REG v.r[i] = a.r[i] > b.r[i] ? a.r[i] : b.r[i];
  return v;
}
TS_INLINE Vec Min(const Vec& a, const Vec& b) {
  Vec v;
  TS_EACH_REG v.r[i] = a.r[i] < b.r[i] ? a.r[i] : b.r[i];
  return v;
}
// Lane-wise a > b ? yes : no.
TS_INLINE Vec SelectGreater(const Vec& a, const Vec& b, const Vec& yes, const Vec& no) {
  Vec v;
  TS_EACH_REG v.r[i] = a.r[i] > b.r[i] ? yes.r[i] : no.r[i];
  return v;
}

TS_INLINE IVec LoadInt(const void* p) {
  IVec v;
  TS_EACH_REG v.r[i] = (UintReg)(reinterpret_cast<const UnalignedIntReg*>(p)[i]);
  return v;
}
TS_INLINE void StoreInt(void* p, const IVec& v) {
  TS_EACH_REG reinterpret_cast<UnalignedIntReg*>(p)[i] = (IntReg)v.r[i];
}
TS_INLINE IVec BroadcastInt(uint32_t x) {
  IVec v;
  TS_EACH_REG v.r[i] = UintReg{} + x;
  return v;
}
// 0, 1, ..., 15.
TS_INLINE IVec Iota() {
  static constexpr uint32_t kCount[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return LoadInt(kCount);
}
TS_INLINE IVec AddInt(const IVec& a, const IVec& b) {
  IVec v;
  TS_EACH_REG v.r[i] = a.r[i] + b.r[i];
  return v;
}
TS_INLINE IVec And(const IVec& a, uint32_t mask) {
  IVec v;
  TS_EACH_REG v.r[i] = a.r[i] & mask;
  return v;
}
TS_INLINE IVec Or(const IVec& a, const IVec& b) {
  IVec v;
  TS_EACH_REG v.r[i] = a.r[i] | b.r[i];
  return v;
}
TS_INLINE IVec Xor(const IVec& a, const IVec& b) {
  IVec v;
  TS_EACH_REG v.r[i] = a.r[i] ^ b.r[i];
  return v;
}
TS_INLINE IVec ShiftLeft(const IVec& a, int bits) {
  IVec v;
  TS_EACH_REG v.r[i] = a.r[i] << bits;
  return v;
}
TS_INLINE IVec ShiftRight(const IVec& a, int bits) {
  IVec v;
  TS_EACH_REG v.r[i] = a.r[i] >> bits;
  return v;
}
// The lanes as signed numbers.
TS_INLINE Vec ToFloat(const IVec& a) {
  Vec v;
  TS_EACH_REG v.r[i] = __builtin_convertvector((IntReg)a.r[i], FloatReg);
  return v;
}
TS_INLINE Vec AsFloat(const IVec& a) {
  Vec v;
  TS_EACH_REG v.r[i] = (FloatReg)a.r[i];
  return v;
}
TS_INLINE IVec AsInt(const Vec& a) {
  IVec v;
  TS_EACH_REG v.r[i] = (UintReg)a.r[i];
  return v;
}
// Truncates towards zero; |a| < 2^31.
TS_INLINE IVec ToInt(const Vec& a) {
  IVec v;
  TS_EACH_REG v.r[i] = (UintReg) __builtin_convertvector(a.r[i], IntReg);
  return v;
}

// Sixteen bytes, signed or not, as numbers.
TS_INLINE Vec LoadInt8(const int8_t* p) {
#if defined(__AVX512F__)
  return {{_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}};
#elif defined(__AVX2__)
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8));
  return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
           _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))}};
#else
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<float>(p[i]);
  return Load(lane);
#endif
}
TS_INLINE Vec LoadUint8(const uint8_t* p) {
#if defined(__AVX512F__)
  return {{_mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}};
#elif defined(__AVX2__)
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8));
  return {{_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)),
           _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high))}};
#else
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<float>(p[i]);
  return Load(lane);
#endif
}

// Sixteen 16-bit words, zero-extended.
TS_INLINE IVec LoadUint16(const uint16_t* p) {
#if defined(__AVX512F__)
  return {
      {(UintReg)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}};
#elif defined(__AVX2__)
  const auto* const half = reinterpret_cast<const __m128i*>(p);
  return {{(UintReg)_mm256_cvtepu16_epi32(_mm_loadu_si128(half)),
           (UintReg)_mm256_cvtepu16_epi32(_mm_loadu_si128(half + 1))}};
#else
  uint32_t lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = p[i];
  return LoadInt(lane);
#endif
}
TS_INLINE Vec LoadBfloat16(const uint16_t* p) { return AsFloat(ShiftLeft(LoadUint16(p), 16)); }

TS_INLINE Vec LoadFloat16(const uint16_t* p) {
#if defined(__AVX512F__)
  return {{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}};
#elif defined(__AVX2__)
  const auto* const half = reinterpret_cast<const __m128i*>(p);
  return {{_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1))}};
#else
  // Exponent and mantissa moved into place and scaled by 2^112 give every finite value, subnormals
  // too.
  const IVec bits = LoadUint16(p);
  const IVec magnitude = ShiftLeft(And(bits, 0x7fff), 13);
  const Vec scaled = Mul(AsFloat(magnitude), Broadcast(0x1p112f));
  const Vec special = AsFloat(Or(magnitude, BroadcastInt(0x7f800000)));
  const Vec finite_limit = Broadcast(65504.0f);
  const Vec value = SelectGreater(scaled, finite_limit, special, scaled);
  return AsFloat(Or(AsInt(value), ShiftLeft(And(bits, 0x8000), 16)));
#endif
}

// Sixteen numbers of eight bits (e4m3: sign, 4 exponent bits biased by 7, 3 of mantissa) divided by
// kFp8Unit: their bits are those of a half float with a bias larger by 8. The two codes of NaN read
// as 480.
constexpr float kFp8Unit = 256.0f;
TS_INLINE Vec LoadFp8(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return {{_mm512_cvtph_ps(half)}};
#elif defined(__AVX2__)
  const __m128i mask = _mm_set1_epi16(static_cast<short>(0xbfff));
  Vec v;
  TS_EACH_REG {
    const __m128i wide =
        _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i * kRegLanes)));
    v.r[i] = _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), mask));
  }
  return v;
#else
  uint32_t lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = p[i];
  const IVec bits = LoadInt(lane);
  const Vec magnitude = Mul(AsFloat(ShiftLeft(And(bits, 0x7f), 20)), Broadcast(0x1p112f));
  return AsFloat(Or(AsInt(magnitude), ShiftLeft(And(bits, 0x80), 24)));
#endif
}

// The low four bits of every lane as a number, plus a constant.
template <int kOffset>
TS_INLINE Vec NibbleToFloat(const IVec& a) {
#if defined(__AVX512F__)
  // One permute of a constant table replaces mask, conversion and addition: it reads four index
  // bits.
  constexpr float o = kOffset;
  const __m512 table = _mm512_setr_ps(o, o + 1, o + 2, o + 3, o + 4, o + 5, o + 6, o + 7, o + 8,
                                      o + 9, o + 10, o + 11, o + 12, o + 13, o + 14, o + 15);
  return {{_mm512_permutexvar_ps((__m512i)a.r[0], table)}};
#else
  const Vec number = ToFloat(And(a, 15));
  return kOffset == 0 ? number : Add(number, Broadcast(kOffset));
#endif
}

// Asks for a cache line that will be read soon, into the L2 cache. Any address will do.
TS_INLINE void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Folds the lanes in one fixed order: halves onto each other until one lane is left.
template <class Fold>
TS_INLINE float Reduce(const Vec& v, Fold fold) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 half = fold(_mm512_castps512_ps256(v.r[0]), _mm512_extractf32x8_ps(v.r[0], 1));
#else
  const __m256 half = fold((__m256)v.r[0], (__m256)v.r[1]);
#endif
  const __m128 quarter = fold(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = fold(quarter, _mm_movehl_ps(quarter, quarter));
  return fold(pair, _mm_shuffle_ps(pair, pair, 1))[0];
#else
  alignas(64) float lane[kLanes];
  Store(lane, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] = fold(lane[i], lane[i + width]);
  }
  return lane[0];
#endif
}
TS_INLINE float ReduceAdd(const Vec& v) {
  return Reduce(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
TS_INLINE float ReduceMax(const Vec& v) {
  return Reduce(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// Loads and stores of the first `count` lanes, 0 < count <= 16; other lanes read `fill`.
TS_INLINE Vec LoadPart(const float* p, int count, float fill) {
  alignas(64) float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = i < count ? p[i] : fill;
  return Load(lane);
}
TS_INLINE void StorePart(float* p, const Vec& v, int count) {
  alignas(64) float lane[kLanes];
  Store(lane, v);
  for (int i = 0; i < count; ++i) p[i] = lane[i];
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_SIMD_H_
