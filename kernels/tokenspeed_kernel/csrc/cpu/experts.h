// SPDX-License-Identifier: MIT
//
// The parts of a mixture of experts that a linear layer lacks: choosing experts from a router's
// logits, and the weighted sum of their outputs. Each token is computed by one thread in one order,
// so its result does not depend on its batch. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_EXPERTS_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_EXPERTS_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/elementwise.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

// A sum of sigmoids may be 0 in float32.
constexpr float kLeastSum = 1e-20f;

TS_INLINE void SigmoidScores(const float* logits, int64_t count, float* scores) {
  const Vec one = Broadcast(1.0f);
  ForLanes(
      count,
      [&](int64_t i) { Store(scores + i, Div(one, Add(one, Exp(Sub(Zero(), Load(logits + i)))))); },
      [&](int64_t i, int rest) {
        const Vec v = Exp(Sub(Zero(), LoadPart(logits + i, rest, 0.0f)));
        StorePart(scores + i, Div(one, Add(one, v)), rest);
      });
}

TS_INLINE void SoftmaxScores(const float* logits, int64_t count, float* scores) {
  Vec largest = Broadcast(kNegInf);
  ForLanes(
      count, [&](int64_t i) { largest = Max(largest, Load(logits + i)); },
      [&](int64_t i, int rest) { largest = Max(largest, LoadPart(logits + i, rest, kNegInf)); });
  const Vec shift = Broadcast(ReduceMax(largest));
  Vec sum = Zero();
  ForLanes(
      count,
      [&](int64_t i) {
        const Vec v = Exp(Sub(Load(logits + i), shift));
        Store(scores + i, v);
        sum = Add(sum, v);
      },
      [&](int64_t i, int rest) {
        const Vec v = Exp(Sub(LoadPart(logits + i, rest, kNegInf), shift));
        StorePart(scores + i, v, rest);
        sum = Add(sum, v);
      });
  const float total = ReduceAdd(sum);
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// Takes the largest value that is left, the first among equals; NaN is never larger. There must be
// one left.
TS_INLINE int64_t TakeLargest(const float* values, uint8_t* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (taken[i] == 0 && (best < 0 || values[i] > values[best])) best = i;
  }
  taken[best] = 1;
  return best;
}

// Marks the experts of all but the best groups as taken.
TS_INLINE void CloseGroups(const RouteArgs& args, const float* choice, float* ranks,
                           uint8_t* closed, uint8_t* taken) {
  const int64_t size = args.num_experts / args.num_groups;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    float first = kNegInf, second = kNegInf;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      if (choice[i] > first) {
        second = first;
        first = choice[i];
      } else if (choice[i] > second) {
        second = choice[i];
      }
    }
    ranks[group] = args.best_two ? first + second : first;
    closed[group] = 0;
  }
  for (int64_t i = 0; i < args.top_groups; ++i) TakeLargest(ranks, closed, args.num_groups);
  // What was taken is what stays open.
  for (int64_t i = 0; i < args.num_experts; ++i) taken[i] = closed[i / size] == 0 ? 1 : 0;
}

struct RouteScratch {
  float *scores, *choice, *ranks;  // [num_experts] each
  uint8_t *taken, *closed;
};

TS_INLINE RouteScratch CarveRoute(int64_t num_experts) {
  const int64_t padded = (num_experts + kLanes - 1) / kLanes * kLanes;
  auto* const floats = static_cast<float*>(
      Scratch(ScratchSlot::kPartials, static_cast<size_t>(padded) * (3 * sizeof(float) + 2)));
  auto* const bytes = reinterpret_cast<uint8_t*>(floats + 3 * padded);
  return {floats, floats + padded, floats + 2 * padded, bytes, bytes + padded};
}

TS_INLINE void RouteToken(const RouteArgs& args, int64_t token, const RouteScratch& scratch) {
  const float* const logits = args.logits + token * args.logits_stride;
  float* const weights = args.weights + token * args.top_k;
  int32_t* const experts = args.experts + token * args.top_k;
  args.sigmoid ? SigmoidScores(logits, args.num_experts, scratch.scores)
               : SoftmaxScores(logits, args.num_experts, scratch.scores);
  for (int64_t i = 0; i < args.num_experts; ++i) {
    scratch.choice[i] = scratch.scores[i] + (args.bias != nullptr ? args.bias[i] : 0.0f);
    scratch.taken[i] = 0;
  }
  if (args.top_groups < args.num_groups) {
    CloseGroups(args, scratch.choice, scratch.ranks, scratch.closed, scratch.taken);
  }
  float sum = 0.0f;
  for (int64_t k = 0; k < args.top_k; ++k) {
    const int64_t expert = TakeLargest(scratch.choice, scratch.taken, args.num_experts);
    experts[k] = static_cast<int32_t>(expert);
    weights[k] = scratch.scores[expert];
    sum += weights[k];
  }
  const float divisor = args.renormalize ? sum + kLeastSum : 1.0f;
  for (int64_t k = 0; k < args.top_k; ++k) weights[k] = weights[k] / divisor * args.scale;
}

void RouteTokens(const RouteArgs& args, int64_t begin, int64_t end) {
  const RouteScratch scratch = CarveRoute(args.num_experts);
  for (int64_t token = begin; token < end; ++token) RouteToken(args, token, scratch);
}
void Route(const RouteArgs& args) {
  ForTokens<RouteArgs, RouteTokens>(args, args.num_tokens, args.num_experts * (4 + args.top_k));
}

void WeightedSumTokens(const WeightedSumArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int32_t* const row_of = args.row_of + token * args.top_k;
    const float* const weights = args.weights + token * args.top_k;
    float* const out = args.out + token * args.width;
    ForLanes(
        args.width,
        [&](int64_t i) {
          Vec sum = Zero();
          for (int64_t k = 0; k < args.top_k; ++k) {
            sum = Fma(Load(args.rows + row_of[k] * args.width + i), Broadcast(weights[k]), sum);
          }
          Store(out + i, sum);
        },
        [&](int64_t i, int rest) {
          Vec sum = Zero();
          for (int64_t k = 0; k < args.top_k; ++k) {
            const Vec row = LoadPart(args.rows + row_of[k] * args.width + i, rest, 0.0f);
            sum = Fma(row, Broadcast(weights[k]), sum);
          }
          StorePart(out + i, sum, rest);
        });
  }
}
void WeightedSum(const WeightedSumArgs& args) {
  ForTokens<WeightedSumArgs, WeightedSumTokens>(args, args.num_tokens, args.top_k * args.width);
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_EXPERTS_H_
