// SPDX-License-Identifier: MIT
//
// Shares the keys of a step's rows of one query among the blocks of latent_decode.cu, once for all
// layers: equal shares of all tiles, but none so short that adding up a row's parts, which one
// block does, takes longer than reading them saves. Does not let the next kernel start before it
// has ended, so every later kernel of the step may read plan and lengths at once. Launched by
// attention/cuda_plan.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/latent_plan.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kLatentPlanThreads = 1024;

struct LatentPlanShape {
  int num_rows;
  int num_blocks;
  float least_share;  // a share has at least the root of this times the longest row's tiles
};

__device__ inline int SumUpTo(int value) {  // over the warp's lanes up to this one
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, value, step);
    if ((threadIdx.x & 31) >= step) value += other;
  }
  return value;
}

}  // namespace tokenspeed

extern "C" __global__ void __launch_bounds__(1024)
    latent_plan(const int* kv_lens, int* memory, const tokenspeed::LatentPlanShape shape) {
  using namespace tokenspeed;
  __shared__ int sums[32];
  const LatentPlanOf<int> plan(memory, shape.num_blocks);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  WaitForPrevious();
  int total = 0, longest = 1;
  if (threadIdx.x == 0) plan.before[0] = 0;
  for (int first = 0; first < shape.num_rows; first += kLatentPlanThreads) {
    const int row = first + threadIdx.x;
    const int tiles = row < shape.num_rows ? (kv_lens[row] + kLatentTile - 1) / kLatentTile : 0;
    longest = max(longest, tiles);
    const int sum = SumUpTo(tiles);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    const int warps = SumUpTo(sums[lane]);
    const int before = __shfl_sync(0xffffffffu, warps, max(warp - 1, 0));
    if (row < shape.num_rows) plan.before[row + 1] = total + (warp > 0 ? before : 0) + sum;
    total += __shfl_sync(0xffffffffu, warps, 31);
    __syncthreads();
  }
  sums[warp] = __reduce_max_sync(0xffffffffu, longest);
  __syncthreads();
  longest = __reduce_max_sync(0xffffffffu, sums[lane]);
  const int least = max(static_cast<int>(sqrtf(shape.least_share * longest)), 1);
  const int share = max((total + shape.num_blocks - 1) / shape.num_blocks, least);
  if (threadIdx.x == 0) {
    plan.head[0] = share;
    plan.head[1] = total;
  }
  for (int row = threadIdx.x; row < shape.num_rows; row += kLatentPlanThreads) {
    const int begin = plan.before[row], end = plan.before[row + 1];
    for (int block = (begin + share - 1) / share; block * share < end; ++block) {
      plan.first_row[block] = row;
    }
  }
  __threadfence();
}
