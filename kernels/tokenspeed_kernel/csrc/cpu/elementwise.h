// SPDX-License-Identifier: MIT
//
// What works token by token: RMS norm, SwiGLU, rotary embedding, penalties, and the reductions that
// sampling is made of. A token is computed by one thread in a fixed order. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_ELEMENTWISE_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_ELEMENTWISE_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/vector_math.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

// Chunks of at least this many elements are worth another thread.
constexpr int64_t kElementsPerChunk = 16384;

// Runs body(args, begin, end) over tokens of `width` elements.
template <class Args, void (*kBody)(const Args&, int64_t, int64_t)>
TS_INLINE void ForTokens(const Args& args, int64_t num_tokens, int64_t width) {
  const int64_t grain = width < kElementsPerChunk ? kElementsPerChunk / (width > 0 ? width : 1) : 1;
  ThreadPool::Global().ParallelFor(
      num_tokens, grain,
      [](void* context, int64_t begin, int64_t end) {
        kBody(*static_cast<const Args*>(context), begin, end);
      },
      const_cast<Args*>(&args));
}

// Calls full(i) for every whole vector of [0, count) and part(i, rest) for what is left.
template <class Full, class Part>
TS_INLINE void ForLanes(int64_t count, const Full& full, const Part& part) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) full(i);
  if (i < count) part(i, static_cast<int>(count - i));
}

TS_INLINE void RmsNormToken(const RmsNormArgs& args, int64_t token) {
  const float* x = args.x + token * args.x_stride;
  float* const out = args.out + token * args.hidden;
  if (args.residual != nullptr) {
    float* const residual = args.residual + token * args.residual_stride;
    ForLanes(
        args.hidden, [&](int64_t i) { Store(residual + i, Add(Load(x + i), Load(residual + i))); },
        [&](int64_t i, int rest) {
          for (int64_t j = i; j < i + rest; ++j) residual[j] += x[j];
        });
    x = residual;
  }
  Vec squares = Zero();
  ForLanes(
      args.hidden,
      [&](int64_t i) {
        const Vec v = Load(x + i);
        squares = Fma(v, v, squares);
      },
      [&](int64_t i, int rest) {
        const Vec v = LoadPart(x + i, rest, 0.0f);
        squares = Fma(v, v, squares);
      });
  const float mean = ReduceAdd(squares) / static_cast<float>(args.hidden);
  const Vec scale = Broadcast(1.0f / __builtin_sqrtf(mean + args.eps));
  ForLanes(
      args.hidden,
      [&](int64_t i) { Store(out + i, Mul(Mul(Load(x + i), scale), Load(args.weight + i))); },
      [&](int64_t i, int rest) {
        const Vec v = Mul(LoadPart(x + i, rest, 0.0f), scale);
        StorePart(out + i, Mul(v, LoadPart(args.weight + i, rest, 0.0f)), rest);
      });
}

void RmsNormTokens(const RmsNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) RmsNormToken(args, token);
}
void RmsNorm(const RmsNormArgs& args) {
  ForTokens<RmsNormArgs, RmsNormTokens>(args, args.num_tokens, args.hidden);
}

TS_INLINE Vec Silu(const Vec& x) { return Div(x, Add(Broadcast(1.0f), Exp(Sub(Zero(), x)))); }

TS_INLINE Vec SiluOf(const GatedArgs&, const Vec& gate, const Vec& up) {
  return Mul(Silu(gate), up);
}

// g * sigmoid(alpha * g) * (u + 1), the gate held below the limit and up within it on both sides.
TS_INLINE Vec ClampedSwigluOf(const GatedArgs& args, const Vec& gate_in, const Vec& up_in) {
  const Vec limit = Broadcast(args.limit), floor = Broadcast(-args.limit);
  const Vec gate = SelectGreater(gate_in, limit, limit, gate_in);
  const Vec below = SelectGreater(up_in, limit, limit, up_in);
  const Vec up = SelectGreater(floor, below, floor, below);
  const Vec power = Exp(Mul(gate, Broadcast(-args.alpha)));
  const Vec swish = Div(gate, Add(Broadcast(1.0f), power));
  return Mul(swish, Add(up, Broadcast(1.0f)));
}

template <Vec (*kOf)(const GatedArgs&, const Vec&, const Vec&)>
TS_INLINE void GatedTokens(const GatedArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const float* const gate = args.x + token * args.x_stride;
    const float* const up = gate + args.width;
    float* const out = args.out + token * args.out_stride;
    ForLanes(
        args.width, [&](int64_t i) { Store(out + i, kOf(args, Load(gate + i), Load(up + i))); },
        [&](int64_t i, int rest) {
          const Vec v = kOf(args, LoadPart(gate + i, rest, 0.0f), LoadPart(up + i, rest, 0.0f));
          StorePart(out + i, v, rest);
        });
  }
}
// An exponential costs about four times a load.
void SiluAndMulTokens(const GatedArgs& args, int64_t begin, int64_t end) {
  GatedTokens<SiluOf>(args, begin, end);
}
void SiluAndMul(const GatedArgs& args) {
  ForTokens<GatedArgs, SiluAndMulTokens>(args, args.num_tokens, 4 * args.width);
}
void ClampedSwigluTokens(const GatedArgs& args, int64_t begin, int64_t end) {
  GatedTokens<ClampedSwigluOf>(args, begin, end);
}
void ClampedSwiglu(const GatedArgs& args) {
  ForTokens<GatedArgs, ClampedSwigluTokens>(args, args.num_tokens, 4 * args.width);
}

TS_INLINE void RotateHead(float* head, const float* cosine, const float* sine, int64_t half) {
  ForLanes(
      half,
      [&](int64_t i) {
        const Vec low = Load(head + i), high = Load(head + half + i);
        const Vec c = Load(cosine + i), s = Load(sine + i);
        Store(head + i, Sub(Mul(low, c), Mul(high, s)));
        Store(head + half + i, Add(Mul(high, c), Mul(low, s)));
      },
      [&](int64_t i, int rest) {
        for (int64_t j = i; j < i + rest; ++j) {
          const float low = head[j], high = head[half + j];
          head[j] = low * cosine[j] - high * sine[j];
          head[half + j] = high * cosine[j] + low * sine[j];
        }
      });
}

TS_INLINE void RotateNeighbours(float* head, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float even = head[2 * i], odd = head[2 * i + 1];
    head[2 * i] = even * cosine[i] - odd * sine[i];
    head[2 * i + 1] = odd * cosine[i] + even * sine[i];
  }
}

TS_INLINE void RotateHeads(const RopeArgs& args, float* heads, int64_t stride, int64_t num_heads,
                           const float* cosine) {
  const int64_t half = args.rot_dim / 2;
  for (int64_t head = 0; head < num_heads; ++head, heads += stride) {
    if (args.interleaved) {
      RotateNeighbours(heads, cosine, cosine + half, half);
    } else {
      RotateHead(heads, cosine, cosine + half, half);
    }
  }
}

void RopeTokens(const RopeArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const float* const cosine = args.cos_sin + args.positions[token] * args.rot_dim;
    RotateHeads(args, args.q + token * args.q_stride, args.q_head_stride, args.num_heads, cosine);
    RotateHeads(args, args.k + token * args.k_stride, args.k_head_stride, args.num_kv_heads,
                cosine);
  }
}
void Rope(const RopeArgs& args) {
  ForTokens<RopeArgs, RopeTokens>(args, args.num_tokens,
                                  (args.num_heads + args.num_kv_heads) * args.rot_dim);
}

// Most tokens were never seen, so whole vectors are skipped by looking at their counts and marks.
TS_INLINE bool AnySeen(const int32_t* counts, const uint8_t* in_prompt, int64_t count) {
  uint32_t seen = 0;
  for (int64_t i = 0; i < count; ++i) seen |= static_cast<uint32_t>(counts[i]) | in_prompt[i];
  return seen != 0;
}

void PenaliseRows(const PenaltyArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t kStep = 64;
  for (int64_t row = begin; row < end; ++row) {
    float* const logits = args.logits + row * args.logits_stride;
    const int32_t* const counts = args.output_counts + args.slots[row] * args.vocab;
    const uint8_t* const in_prompt = args.prompt_mask + args.slots[row] * args.vocab;
    const float repetition = args.repetition[row];
    const float frequency = args.frequency[row], presence = args.presence[row];
    for (int64_t first = 0; first < args.vocab; first += kStep) {
      const int64_t count = args.vocab - first < kStep ? args.vocab - first : kStep;
      if (!AnySeen(counts + first, in_prompt + first, count)) continue;
      for (int64_t i = first; i < first + count; ++i) {
        if (counts[i] == 0 && in_prompt[i] == 0) continue;
        float logit = logits[i] > 0 ? logits[i] / repetition : logits[i] * repetition;
        if (counts[i] > 0) {
          logit = logit - frequency * static_cast<float>(counts[i]);
          logit = logit - presence;
        }
        logits[i] = logit;
      }
    }
  }
}
void Penalties(const PenaltyArgs& args) {
  ForTokens<PenaltyArgs, PenaliseRows>(args, args.num_rows, args.vocab);
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_ELEMENTWISE_H_
