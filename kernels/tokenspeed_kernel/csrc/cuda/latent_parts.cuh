// SPDX-License-Identifier: MIT
//
// What the kernels of latent attention have in common: the sizes, and how the parts of a row that
// is cut are added up.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/softmax.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kLatent = 512;
constexpr int kPanels = 9;  // of a token, 64 columns each; the last holds the rotated part

// Adds up the parts of one head by one warp, in their order. place(i): of part i in `partial`
// [.., 512] and `stats`, which holds its peak and the sum of what is relative to it.
template <typename Place>
__device__ inline void AddParts(const float* partial, const float2* stats, int parts,
                                const Place& place, __nv_bfloat16* out) {
  const int lane = threadIdx.x & 31;
  float peak = -INFINITY, total = 0.0f;
  for (int i = lane; i < parts; i += 32) peak = fmaxf(peak, __ldcg(&stats[place(i)]).x);
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
  }
  float4 sum[4] = {};
#pragma unroll 4
  for (int i = 0; i < parts; ++i) {
    const float2 mine = __ldcg(&stats[place(i)]);
    const auto* part = reinterpret_cast<const float4*>(partial + place(i) * kLatent) + lane;
    const float share = FastExp2(mine.x - peak);
    total += mine.y * share;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 value = __ldcg(part + j * 32);
      sum[j].x += share * value.x;
      sum[j].y += share * value.y;
      sum[j].z += share * value.z;
      sum[j].w += share * value.w;
    }
  }
  const float scale = 1.0f / total;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum[j].x * scale, sum[j].y * scale),
                                     __floats2bfloat162_rn(sum[j].z * scale, sum[j].w * scale)};
    *reinterpret_cast<uint2*>(out + j * 128 + lane * 4) = *reinterpret_cast<const uint2*>(pairs);
  }
}

}  // namespace tokenspeed
