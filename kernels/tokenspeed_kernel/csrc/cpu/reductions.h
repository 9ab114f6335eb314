// SPDX-License-Identifier: MIT
//
// Passes over one row of logits: maxima, sums of exponentials, collection above a threshold, and
// the Gumbel-max draw with Philox4x32-10 noise (Salmon et al., SC 2011). sampling.cc combines them.
// Each runs on one thread in a fixed order. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_REDUCTIONS_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_REDUCTIONS_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/vector_math.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

TS_INLINE Vec LoadUpTo(const float* values, int64_t at, int64_t count, float fill) {
  if (at + kLanes <= count) return Load(values + at);
  return LoadPart(values + at, static_cast<int>(count - at), fill);
}

void Scale(const float* values, int64_t count, float shift, float divisor, float* out) {
  const Vec from = Broadcast(shift);
  const Vec by = Broadcast(divisor);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec v = Div(Sub(LoadUpTo(values, i, count, kNegInf), from), by);
    if (i + kLanes <= count) {
      Store(out + i, v);
    } else {
      StorePart(out + i, v, static_cast<int>(count - i));
    }
  }
}

void GroupMax(const float* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    *out++ = ReduceMax(LoadUpTo(values, i, count, kNegInf));
  }
}

TS_INLINE bool AnyAtLeast(const Vec& v, float threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v.r[0], _mm512_set1_ps(threshold), _CMP_GE_OQ) != 0;
#else
  return ReduceMax(v) >= threshold;
#endif
}

int64_t ArgMax(const float* values, int64_t count) {
  Vec largest = Broadcast(kNegInf);
  for (int64_t i = 0; i < count; i += kLanes) {
    largest = Max(LoadUpTo(values, i, count, kNegInf), largest);
  }
  const float top = ReduceMax(largest);
  for (int64_t i = 0; i < count; i += kLanes) {
    if (!AnyAtLeast(LoadUpTo(values, i, count, kNegInf), top)) continue;
    for (int64_t j = i; j < count && j < i + kLanes; ++j) {
      if (values[j] == top) return j;
    }
  }
  return 0;
}

int64_t Collect(const float* values, int64_t count, float threshold, float* out, int32_t* ids) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    if (!AnyAtLeast(LoadUpTo(values, i, count, kNegInf), threshold)) continue;
    for (int64_t j = i; j < count && j < i + kLanes; ++j) {
      if (!(values[j] >= threshold)) continue;
      out[found] = values[j];
      ids[found] = static_cast<int32_t>(j);
      ++found;
    }
  }
  return found;
}

double SumExp(const float* values, int64_t count, float shift) {
  // Floats within a stretch, doubles over stretches: the error stays that of a float exponential.
  constexpr int64_t kStretch = 64 * kLanes;
  const Vec by = Broadcast(shift);
  double total = 0.0;
  for (int64_t first = 0; first < count; first += kStretch) {
    const int64_t last = first + kStretch < count ? first + kStretch : count;
    Vec sum = Zero();
    for (int64_t i = first; i < last; i += kLanes) {
      sum = Add(sum, Exp(Sub(LoadUpTo(values, i, last, kNegInf), by)));
    }
    total += static_cast<double>(ReduceAdd(sum));
  }
  return total;
}

// High and low words of the products of every lane with `factor`.
TS_INLINE void MultiplyWide(const IVec& a, uint32_t factor, IVec* high, IVec* low) {
#if defined(__AVX512F__)
  const __m512i by = _mm512_set1_epi32(static_cast<int>(factor));
  const __m512i even = _mm512_mul_epu32((__m512i)a.r[0], by);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a.r[0], 32), by);
  low->r[0] = (UintReg)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high->r[0] = (UintReg)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  const __m256i by = _mm256_set1_epi32(static_cast<int>(factor));
  for (int i = 0; i < kRegs; ++i) {
    const __m256i even = _mm256_mul_epu32((__m256i)a.r[i], by);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a.r[i], 32), by);
    low->r[i] = (UintReg)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    high->r[i] = (UintReg)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  }
#else
  uint32_t lanes[kLanes], highs[kLanes], lows[kLanes];
  StoreInt(lanes, a);
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = static_cast<uint64_t>(lanes[i]) * factor;
    highs[i] = static_cast<uint32_t>(product >> 32);
    lows[i] = static_cast<uint32_t>(product);
  }
  *high = LoadInt(highs);
  *low = LoadInt(lows);
#endif
}

// The four output words of sixteen counters (first + lane, position) under one key.
TS_INLINE void Philox(uint32_t first, uint64_t position, uint64_t seed, IVec (&c)[4]) {
  c[0] = AddInt(Iota(), BroadcastInt(first));
  c[1] = BroadcastInt(static_cast<uint32_t>(position));
  c[2] = BroadcastInt(static_cast<uint32_t>(position >> 32));
  c[3] = BroadcastInt(0);
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    IVec high0, low0, high2, low2;
    MultiplyWide(c[0], 0xD2511F53u, &high0, &low0);
    MultiplyWide(c[2], 0xCD9E8D57u, &high2, &low2);
    c[0] = Xor(Xor(high2, c[1]), BroadcastInt(key0));
    c[1] = low2;
    c[2] = Xor(Xor(high0, c[3]), BroadcastInt(key1));
    c[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

TS_INLINE Vec Gumbel(const IVec& word) {
  Vec u = Fma(ToFloat(ShiftRight(word, 8)), Broadcast(0x1p-24f), Broadcast(0x1p-25f));
  // The largest words round to 1, whose noise would be infinite.
  u = Min(u, Broadcast(0x1.fffffep-1f));
  const Vec inner = Sub(Zero(), Log(u));
  return Sub(Zero(), Log(inner));
}

constexpr int kNoiseTokens = 4 * kLanes;  // tokens that sixteen counters serve
// No noise is larger: -log(-log(1 - 2^-24)) = 16.6355.
constexpr float kLargestNoise = 16.64f;

// Adds the tokens [first, first + kNoiseTokens) to the search; `best` and `best_at` hold the
// winner.
TS_INLINE void SearchBlock(const NoisyArgs& args, int64_t first, float* best, int64_t* best_at) {
  IVec words[4];
  Philox(static_cast<uint32_t>(first / 4), args.position, args.seed, words);
  alignas(64) float noise[4][kLanes];
  for (int w = 0; w < 4; ++w) Store(noise[w], Gumbel(words[w]));
  for (int i = 0; i < kNoiseTokens && first + i < args.count; ++i) {
    const float value = args.values[first + i];
    if (!(value >= args.threshold)) continue;
    const float noisy = value + noise[i % 4][i / 4];
    // A lower index wins among equals, whatever the order of the search.
    if (noisy > *best || (noisy == *best && first + i < *best_at)) {
      *best = noisy;
      *best_at = first + i;
    }
  }
}

int32_t BestNoisy(const NoisyArgs& args) {
  float best = kNegInf;
  int64_t best_at = args.count;
  // The block of the likeliest token first: its noisy value lets most other blocks be passed over.
  const int64_t likeliest = ArgMax(args.values, args.count) / kNoiseTokens * kNoiseTokens;
  SearchBlock(args, likeliest, &best, &best_at);
  for (int64_t first = 0; first < args.count; first += kNoiseTokens) {
    if (first == likeliest) continue;
    Vec largest = Broadcast(kNegInf);
    for (int64_t i = first; i < first + kNoiseTokens && i < args.count; i += kLanes) {
      largest = Max(LoadUpTo(args.values, i, args.count, kNegInf), largest);
    }
    const float reach = best - kLargestNoise;
    if (AnyAtLeast(largest, args.threshold > reach ? args.threshold : reach)) {
      SearchBlock(args, first, &best, &best_at);
    }
  }
  return best_at < args.count ? static_cast<int32_t>(best_at) : 0;
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_REDUCTIONS_H_
