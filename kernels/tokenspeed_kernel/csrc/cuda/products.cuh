// SPDX-License-Identifier: MIT
//
// What our dense products on Hopper share: the words that blocks of a cluster have with each
// other, and how sums in registers become rows of the output.
//
// x [T, K] is the left operand, rows in tiles of 64; rows of the weight are columns of the tile.
// With a gated tile the first half of its columns are rows of the gate, the second half the same
// rows of up, so one thread holds both sums of an output. Device code for sm_90a alone.
#pragma once

#include "kernels/tokenspeed_kernel/csrc/cuda/hopper.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

// Blocks of a cluster; GPUs without clusters get an empty kernel, which nothing launches.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define TOKENSPEED_CLUSTER(BLOCKS)
#else
#define TOKENSPEED_CLUSTER(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
#endif

namespace tokenspeed::hopper {

constexpr int kPanel = 64;        // columns of K
constexpr int kPanelRow = 128;    // bytes of a row of a panel
constexpr int kEightRows = 1024;  // bytes

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; what they wrote to shared memory before is visible.
__device__ inline void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// Makes barriers visible to the copies and arrivals of other blocks.
__device__ inline void FenceBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The address, in shared memory of the cluster, of what lies at `local` in block `rank`.
__device__ inline uint32_t InBlock(uint32_t local, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(local), "r"(rank));
  return address;
}

// Orders nothing but what the block itself did: a release to the cluster would wait for all memory.
__device__ inline void ArriveInBlock(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(InBlock(SharedAddress(barrier), rank))
      : "memory");
}

__device__ inline float4 LoadInBlock(uint32_t local, uint32_t rank) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(InBlock(local, rank))
               : "memory");
  return value;
}

// As CopyBox, to the same place in both blocks of a cluster of two, each of which counts the bytes
// at its own barrier.
__device__ inline void CopyBoxToBoth(void* to, const CUtensorMap* map, int column, int row,
                                     uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "h"(static_cast<uint16_t>(3))
      : "memory");
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline float SiluAndMul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

__device__ inline uint32_t Packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ inline void StorePair(__nv_bfloat16* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = Packed(low, high);
}
__device__ inline void StorePair(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}

// Lane i of a quad has word i of four rows' pieces and gets all four words of piece i.
__device__ inline uint4 TransposeQuad(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
  const uint32_t cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
  if (odd)
    a = ab, c = cd;
  else
    b = ab, d = cd;
  const uint32_t ac = __shfl_xor_sync(0xffffffffu, high ? a : c, 2);
  const uint32_t bd = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
  if (high)
    a = ac, b = bd;
  else
    c = ac, d = bd;
  return make_uint4(a, b, c, d);
}

template <typename Out>
struct Output {
  Out* out;                   // [rows, columns]
  const __nv_bfloat16* bias;  // [columns], or [2 * columns] where gated, or null
  int rows;
  int columns;  // a multiple of 8
};

// The two outputs of a thread at columns `column` and the next, of row half `half`.
template <int N, bool GATED, typename Out>
__device__ inline float2 Finished(const float (&d)[N / 2], int eight, int half, int column,
                                  const Output<Out>& output) {
  float low = d[eight * 4 + half * 2], high = d[eight * 4 + half * 2 + 1];
  const bool biased = output.bias != nullptr && column < output.columns;
  if (biased) {
    low += ToFloat(output.bias[column]);
    high += ToFloat(output.bias[column + 1]);
  }
  if (GATED) {
    constexpr int kUp = N / 16;  // eights of columns
    float low_up = d[(eight + kUp) * 4 + half * 2], high_up = d[(eight + kUp) * 4 + half * 2 + 1];
    if (biased) {
      low_up += ToFloat(output.bias[output.columns + column]);
      high_up += ToFloat(output.bias[output.columns + column + 1]);
    }
    low = SiluAndMul(low, low_up);
    high = SiluAndMul(high, high_up);
  }
  return make_float2(low, high);
}

// Stores a warpgroup's sums d [64, N], whose first output is (row, column).
template <int N, bool GATED, typename Out>
__device__ inline void StoreTile(const float (&d)[N / 2], int row, int column,
                                 const Output<Out>& output) {
  constexpr int kEights = GATED ? N / 16 : N / 8;
  constexpr bool kWide = sizeof(Out) == 2 && kEights % 4 == 0;
  const int lane = threadIdx.x & 31;
  const int quad = lane & 3;
  row += (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + half * 8;
    Out* to = output.out + static_cast<int64_t>(at) * output.columns;
    if constexpr (kWide) {
#pragma unroll
      for (int eight = 0; eight < kEights; eight += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair =
              Finished<N, GATED>(d, eight + i, half, column + (eight + i) * 8 + quad * 2, output);
          words[i] = Packed(pair.x, pair.y);
        }
        const uint4 whole = TransposeQuad(words[0], words[1], words[2], words[3]);
        const int first = column + (eight + quad) * 8;
        if (at < output.rows && first < output.columns)
          *reinterpret_cast<uint4*>(to + first) = whole;
      }
    } else {
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        const int first = column + eight * 8 + quad * 2;
        const float2 pair = Finished<N, GATED>(d, eight, half, first, output);
        if (at < output.rows && first < output.columns) StorePair(to + first, pair.x, pair.y);
      }
    }
  }
}

}  // namespace tokenspeed::hopper
