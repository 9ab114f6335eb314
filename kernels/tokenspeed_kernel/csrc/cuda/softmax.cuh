// SPDX-License-Identifier: MIT
//
// The softmax of attention on Hopper, over scores as a warpgroup's products leave them: a thread
// has two queries, eight apart, and of each eight keys or columns two beside each other. Base-2.
// Device code only.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

// Sums are brought down to a new largest score only when it has grown by this, in powers of two:
// they stay as exact, since weights and totals are relative to the same number.
constexpr float kLeastGrowth = 8.0f;

struct Softmax {
  float peak[2] = {-INFINITY, -INFINITY};  // what scores are compared with, without the scale
  float total[2] = {0.0f, 0.0f};           // of this thread's keys
};

// Turns scores into weights; `shrink` is what earlier sums are worth now. `scale` holds log2(e).
template <int N>
__device__ inline void Weigh(float (&scores)[N], Softmax& state, float scale, float (&shrink)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float peak = state.peak[half];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      peak = fmaxf(peak, fmaxf(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
    }
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    shrink[half] = 1.0f;
    if ((peak - state.peak[half]) * scale > kLeastGrowth) {
      shrink[half] = FastExp2((state.peak[half] - peak) * scale);
      state.peak[half] = peak;
    }
    const float base = state.peak[half] == -INFINITY ? 0.0f : state.peak[half] * scale;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[i * 4 + half * 2 + j];
        score = FastExp2(fmaf(score, scale, -base));
        total += score;
      }
    }
    state.total[half] = state.total[half] * shrink[half] + total;
  }
}

// Weights as the next product takes them, 16 keys at a time.
template <int N>
__device__ inline void Round(const float (&scores)[N], uint32_t (&weights)[N / 8][4]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(scores[2 * i], scores[2 * i + 1]);
    weights[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <int N>
__device__ inline void Shrink(float (&out)[N], const float (&shrink)[2]) {
  if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] *= shrink[i >> 1 & 1];
}

// The sum over the keys of all threads that have the query.
__device__ inline float WholeTotal(float total) {
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  return total + __shfl_xor_sync(0xffffffffu, total, 2);
}

}  // namespace tokenspeed
