// SPDX-License-Identifier: MIT
//
// The online softmax of attention.h, a row at a time: the soft cap, the weights of a tile of
// scores, folding one split's state into another, and the last division, in which a sink takes
// part. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_SOFTMAX_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_SOFTMAX_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/attention_plan.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/vector_math.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

constexpr int kTileKeys = 64;
constexpr int kKeyPanels = kTileKeys / kLanes;
// cap * tanh(score / cap) of a row's scores.
TS_INLINE void CapRow(float* scores, int64_t num_panels, float cap) {
  const Vec limit = Broadcast(cap), slope = Broadcast(2.0f / cap);
  const Vec one = Broadcast(1.0f), two = Broadcast(2.0f);
  for (int64_t p = 0; p < num_panels; ++p) {
    // tanh(x) = 1 - 2 / (e^(2 x) + 1)
    const Vec power = Exp(Mul(Load(scores + p * kLanes), slope));
    const Vec tanh = Sub(one, Div(two, Add(power, one)));
    Store(scores + p * kLanes, Mul(limit, tanh));
  }
}

// Minus infinity for positions outside [low, high) of the tile.
TS_INLINE void MaskRow(float* scores, int64_t num_panels, int64_t low, int64_t high) {
  const Vec below = Broadcast(static_cast<float>(low) - 0.5f);
  const Vec above = Broadcast(static_cast<float>(high) - 0.5f);
  const Vec nothing = Broadcast(kNegInf);
  for (int64_t p = 0; p < num_panels; ++p) {
    const Vec at = Add(ToFloat(Iota()), Broadcast(static_cast<float>(p * kLanes)));
    const Vec masked = SelectGreater(above, at, Load(scores + p * kLanes), nothing);
    Store(scores + p * kLanes, SelectGreater(at, below, masked, nothing));
  }
}

// Turns a row's scores into weights; positions outside [low, high) of the tile weigh nothing.
// Updates the row's maximum and sum and rescales its output.
TS_INLINE void SoftmaxRow(float* scores, int64_t num_panels, int64_t low, int64_t high,
                          const SoftmaxState& state, int64_t row, int64_t value_dim) {
  if (low >= high) {
    for (int64_t p = 0; p < num_panels; ++p) Store(scores + p * kLanes, Zero());
    return;
  }
  if (low > 0 || high < num_panels * kLanes) MaskRow(scores, num_panels, low, high);
  Vec largest = Load(scores);
  for (int64_t p = 1; p < num_panels; ++p) largest = Max(largest, Load(scores + p * kLanes));
  const float tile_max = ReduceMax(largest);
  const float old_max = state.max[row];
  const float new_max = tile_max > old_max ? tile_max : old_max;
  const Vec top = Broadcast(new_max);
  Vec sum = Zero();
  for (int64_t p = 0; p < num_panels; ++p) {
    const Vec weight = ExpOfNegative(Sub(Load(scores + p * kLanes), top));
    Store(scores + p * kLanes, weight);
    sum = Add(sum, weight);
  }
  if (new_max == old_max) {
    state.sum[row] += ReduceAdd(sum);
    return;
  }
  const Vec decay = ExpOfNegative(Broadcast(old_max - new_max));
  state.sum[row] = state.sum[row] * decay.r[0][0] + ReduceAdd(sum);
  state.max[row] = new_max;
  float* const out = state.out + row * value_dim;
  for (int64_t i = 0; i < value_dim; i += kLanes) Store(out + i, Mul(Load(out + i), decay));
}

// total = total followed by part, for every row that part saw a key for.
TS_INLINE void Fold(const SoftmaxState& part, const SoftmaxState& total, int64_t rows,
                    int64_t value_dim) {
  for (int64_t row = 0; row < rows; ++row) {
    if (part.max[row] == kNegInf) continue;
    const float largest = part.max[row] > total.max[row] ? part.max[row] : total.max[row];
    const Vec keep = Exp(Broadcast(total.max[row] - largest));
    const Vec take = Exp(Broadcast(part.max[row] - largest));
    total.sum[row] = total.sum[row] * keep.r[0][0] + part.sum[row] * take.r[0][0];
    total.max[row] = largest;
    float* const out = total.out + row * value_dim;
    const float* const add = part.out + row * value_dim;
    for (int64_t i = 0; i < value_dim; i += kLanes) {
      Store(out + i, Fma(Load(add + i), take, Mul(Load(out + i), keep)));
    }
  }
}

// What the row's weighted values are multiplied by. A sink adds its weight to the sum and no value.
TS_INLINE float InverseSum(const SoftmaxState& state, int64_t row, const float* sink) {
  if (sink == nullptr) return 1.0f / state.sum[row];
  const float largest = *sink > state.max[row] ? *sink : state.max[row];
  const float keep = Exp(Broadcast(state.max[row] - largest)).r[0][0];
  const float added = Exp(Broadcast(*sink - largest)).r[0][0];
  return keep / (state.sum[row] * keep + added);
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_ATTENTION_SOFTMAX_H_
