// SPDX-License-Identifier: MIT
//
// Sixteen columns of sixteen rows, turned in registers: keys as they lie become panels that linear
// tiles read. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_TRANSPOSE_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_TRANSPOSE_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/simd.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
// in[16] registers of 16 floats become their transpose.
TS_INLINE void TransposeStore(const float* const* rows, int64_t column, float* out) {
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i] + column);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  // r[4 i + j] holds, in its 128-bit part c, column 4 c + j of rows 4 i .. 4 i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 low01 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x44);
    const __m512 high23 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xee);
    _mm512_store_ps(out + 16 * j, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_store_ps(out + 16 * (4 + j), _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_store_ps(out + 16 * (8 + j), _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_store_ps(out + 16 * (12 + j), _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
}
#elif defined(__AVX2__)
TS_INLINE void Transpose8Store(const float* const* rows, int64_t column, float* out) {
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows[i] + column);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    _mm256_store_ps(out + 16 * j, _mm256_permute2f128_ps(r[j], r[4 + j], 0x20));
    _mm256_store_ps(out + 16 * (4 + j), _mm256_permute2f128_ps(r[j], r[4 + j], 0x31));
  }
}
TS_INLINE void TransposeStore(const float* const* rows, int64_t column, float* out) {
  for (int half = 0; half < 2; ++half) {
    Transpose8Store(rows + 8 * half, column, out + 8 * half);
    Transpose8Store(rows + 8 * half, column + 8, out + 8 * half + 8 * 16);
  }
}
#else
TS_INLINE void TransposeStore(const float* const* rows, int64_t column, float* out) {
  for (int c = 0; c < kLanes; ++c) {
    for (int r = 0; r < kLanes; ++r) out[c * kLanes + r] = rows[r][column + c];
  }
}
#endif

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_TRANSPOSE_H_
