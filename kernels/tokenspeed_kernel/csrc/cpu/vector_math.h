// SPDX-License-Identifier: MIT
//
// Elementary functions on sixteen lanes, accurate to about one unit in the last place of a float.
// Own polynomials, so that results do not change with the C library. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_VECTOR_MATH_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_VECTOR_MATH_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/simd.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

constexpr float kNegInf = -__builtin_inff();

// The nearest integer, ties to even, for |x| < 2^22.
TS_INLINE Vec Round(const Vec& x) {
  const Vec magic = Broadcast(0x1.8p23f);
  return Sub(Add(x, magic), magic);
}

// e^x / 2^n, where n is the nearest integer to x / ln 2.
TS_INLINE Vec ExpTaylor(const Vec& x, const Vec& n) {
  // ln 2 in two parts: the first has few bits, so that n times it is exact.
  Vec r = Fma(n, Broadcast(-0x1.62e4p-1f), x);
  r = Fma(n, Broadcast(-0x1.7f7d1cp-20f), r);
  // Taylor series of e^r on |r| <= 0.347; the last term left out is below 2^-27.
  Vec p = Broadcast(1.0f / 5040);
  p = Fma(p, r, Broadcast(1.0f / 720));
  p = Fma(p, r, Broadcast(1.0f / 120));
  p = Fma(p, r, Broadcast(1.0f / 24));
  p = Fma(p, r, Broadcast(1.0f / 6));
  p = Fma(p, r, Broadcast(0.5f));
  p = Fma(p, r, Broadcast(1.0f));
  p = Fma(p, r, Broadcast(1.0f));
  return p;
}

// e^x: 0 below -104, infinity above 89; NaN stays NaN.
TS_INLINE Vec Exp(const Vec& x_in) {
  // The comparison's order keeps NaN: a false comparison takes the second operand.
  Vec x = SelectGreater(x_in, Broadcast(89.0f), Broadcast(89.0f), x_in);
  x = SelectGreater(Broadcast(-104.0f), x, Broadcast(-104.0f), x);
  const Vec n = Round(Mul(x, Broadcast(0x1.715476p+0f)));
  const Vec p = ExpTaylor(x, n);
#if defined(__AVX512F__)
  return {{_mm512_scalef_ps(p.r[0], n.r[0])}};
#else
  // 2^n in two factors, so that results near both ends of the range come out right.
  const Vec half = Round(Mul(n, Broadcast(0.5f)));
  const auto power = [](const Vec& k) __attribute__((always_inline)) {
    return AsFloat(ShiftLeft(AddInt(ToInt(k), BroadcastInt(127)), 23));
  };
  return Mul(Mul(p, power(half)), power(Sub(n, half)));
#endif
}

// e^x for x <= 0, in half the operations: 0 below -87; NaN stays NaN.
TS_INLINE Vec ExpOfNegative(const Vec& x) {
  // The nearest integer to x / ln 2 is in the low bits of the sum.
  const Vec magic = Broadcast(0x1.8p23f);
  const Vec shifted = Fma(x, Broadcast(0x1.715476p+0f), magic);
  const Vec p = ExpTaylor(x, Sub(shifted, magic));
  const Vec power = AsFloat(AddInt(ShiftLeft(AsInt(shifted), 23), BroadcastInt(127u << 23)));
  // The comparison's order keeps NaN: a false comparison takes the second operand.
  return SelectGreater(Broadcast(-87.0f), x, Zero(), Mul(p, power));
}

// ln x for normal x > 0.
TS_INLINE Vec Log(const Vec& x) {
  // x = 2^e * m with m in [sqrt(1/2), sqrt(2)).
  const IVec bits = AsInt(x);
  const IVec offset = AddInt(bits, BroadcastInt(0x3f800000 - 0x3f3504f3));
  const Vec e = ToFloat(AddInt(ShiftRight(offset, 23), BroadcastInt(static_cast<uint32_t>(-127))));
  const Vec m = AsFloat(AddInt(And(offset, 0x007fffff), BroadcastInt(0x3f3504f3)));
  // ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716; written f - s * (f - R) with f = m -
  // 1 to keep the leading term exact.
  const Vec f = Sub(m, Broadcast(1.0f));
  const Vec s = Div(f, Add(m, Broadcast(1.0f)));
  const Vec z = Mul(s, s);
  Vec tail = Broadcast(2.0f / 9);
  tail = Fma(tail, z, Broadcast(2.0f / 7));
  tail = Fma(tail, z, Broadcast(2.0f / 5));
  tail = Fma(tail, z, Broadcast(2.0f / 3));
  tail = Mul(tail, z);
  // 2 s = f - s f, so ln m = f - s * (f - tail).
  const Vec low = Fma(e, Broadcast(0x1.7f7d1cp-20f), Mul(s, Sub(tail, f)));
  return Fma(e, Broadcast(0x1.62e4p-1f), Add(f, low));
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_VECTOR_MATH_H_
