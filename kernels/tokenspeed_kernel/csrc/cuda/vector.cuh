// SPDX-License-Identifier: MIT
//
// 16-byte vectors of the three activation types, and sums over a block.
//
// Included by every kernel here. Device code only: no host function, no launch, no global state.
// A Pack holds 16 bytes of T (four floats, eight halves); memory is touched only through whole
// packs, so a warp's access is 512 contiguous bytes. Arithmetic is always float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace tokenspeed {

__device__ inline float ToFloat(float value) { return value; }
__device__ inline float ToFloat(__half value) { return __half2float(value); }
__device__ inline float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T FromFloat(float value);
template <>
__device__ inline float FromFloat<float>(float value) {
  return value;
}
template <>
__device__ inline __half FromFloat<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Overlap with the neighbours in the stream, where launches allow it (cuda_driver.py) and the GPU
// can: the next kernel's blocks may start, and everything that the kernels before wrote is visible.
//
// Every kernel calls the second before it writes anything. Before it, it may read only what was
// there before the step's embedding: weights, positions, slots, lengths, block tables, keys and
// values of earlier steps and copied blocks. That is safe however many kernels are under way at
// once (each may begin before those ahead of it have waited): an embedding is an ordinary launch,
// which begins when all before it has ended, and none of ours after it begins before its blocks
// have ended, in whatever layer. A plan is such a launch too: it allows no overlap, and its blocks
// end after their wait and a fence. What is written in a step is written after the wait, so no
// reader ahead is overtaken.
__device__ inline void LaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename T>
__device__ inline Pack<T> LoadPack(const T* base, int64_t index) {
  return reinterpret_cast<const Pack<T>*>(base)[index];
}

template <typename T>
__device__ inline void StorePack(T* base, int64_t index, const Pack<T>& pack) {
  reinterpret_cast<Pack<T>*>(base)[index] = pack;
}

// 16 or 8 bytes that are read once: they leave the first-level cache to what is read again.
// Volatile, so that loads written before their first use are all in flight at it. What they read
// does not change during the kernel.
__device__ inline uint4 LoadStreamed16(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

__device__ inline uint2 LoadStreamed8(const void* address) {
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address));
  return value;
}

// 2 to the power of `value`, by the hardware's own approximation (two units in the last place).
__device__ inline float FastExp2(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

__device__ inline float WarpSum(float value) {
  for (int lane = 16; lane > 0; lane >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

// The sum over all threads of the block, in every thread. `scratch` is 32 floats of shared memory;
// the caller does not use it again before another barrier.
__device__ inline float BlockSum(float value, float* scratch) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  value = WarpSum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  const int num_warps = (blockDim.x + 31) >> 5;
  return WarpSum(lane < num_warps ? scratch[lane] : 0.0f);
}

}  // namespace tokenspeed
