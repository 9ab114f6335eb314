// SPDX-License-Identifier: MIT
//
// Hopper's own instructions as functions: bulk tensor copies that complete on barriers in shared
// memory, and matrix products of a warpgroup (four warps) that run while the warps go on.
//
// Device code for sm_90a alone. Tiles in shared memory are panels of 64 columns of 2 bytes: a row
// is 128 bytes, its 16-byte pieces permuted by the row's number modulo 8 ("128-byte swizzle"),
// eight rows are 1,024 bytes, and a panel begins at a multiple of that.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace tokenspeed::hopper {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}

__device__ inline void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

__device__ inline void ArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// Returns once the barrier's phase of this parity is over.
__device__ inline void Wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Brings the description of a tensor, so that the first copy of it does not wait for that.
__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of the tensor, from (column, row) on, to `to`.
__device__ inline void CopyBox(void* to, const CUtensorMap* map, int column, int row,
                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row)
      : "memory");
}

// A box of a tensor of three dimensions.
__device__ inline void CopyBox(void* to, const CUtensorMap* map, int column, int row, int layer,
                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "r"(layer)
      : "memory");
}

// A box of a tensor of four dimensions.
__device__ inline void CopyBox(void* to, const CUtensorMap* map, int column, int row, int layer,
                               int last, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "r"(layer), "r"(last)
      : "memory");
}

// Makes ordinary writes to shared memory visible to copies and products that come after a barrier.
__device__ inline void FenceShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int BARRIER, int THREADS>
__device__ inline void Sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// Counts for a barrier that others sync at, without waiting.
template <int BARRIER, int THREADS>
__device__ inline void Signal() {
  asm volatile("bar.arrive %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

template <int REGISTERS>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// A swizzled operand: `leading` bytes from a panel to the next (columns side by side only),
// `stride` from eight rows to the next eight.
__device__ inline uint64_t Operand(const void* from, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return kSwizzle128 | static_cast<uint64_t>(stride >> 4) << 32 |
         static_cast<uint64_t>(leading >> 4) << 16 | ((SharedAddress(from) & 0x3ffff) >> 4);
}

// The operand `bytes` further on.
__device__ inline uint64_t Advance(uint64_t operand, uint32_t bytes) {
  return operand + (bytes >> 4);
}

__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT>
__device__ inline void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wait.
template <int N>
__device__ inline void Pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
// Names and operands of the first so many accumulators.
#define TOKENSPEED_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7" ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define TOKENSPEED_NAMES_24 \
  TOKENSPEED_NAMES_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define TOKENSPEED_NAMES_32 \
  TOKENSPEED_NAMES_24 ", " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define TOKENSPEED_NAMES_48 \
  TOKENSPEED_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39" ", " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define TOKENSPEED_NAMES_64 \
  TOKENSPEED_NAMES_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55" ", " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define TOKENSPEED_NAMES_96 \
  TOKENSPEED_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71" ", " \
  "%72, %73, %74, %75, %76, %77, %78, %79" ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87" ", " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define TOKENSPEED_NAMES_128 \
  TOKENSPEED_NAMES_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103" ", " \
  "%104, %105, %106, %107, %108, %109, %110, %111" ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119" ", " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define TOKENSPEED_D8(I) \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), \
  "+f"(d[I + 6]), "+f"(d[I + 7])
#define TOKENSPEED_SUMS_16 \
  TOKENSPEED_D8(0), TOKENSPEED_D8(8)
#define TOKENSPEED_SUMS_24 \
  TOKENSPEED_SUMS_16, \
  TOKENSPEED_D8(16)
#define TOKENSPEED_SUMS_32 \
  TOKENSPEED_SUMS_24, \
  TOKENSPEED_D8(24)
#define TOKENSPEED_SUMS_48 \
  TOKENSPEED_SUMS_32, \
  TOKENSPEED_D8(32), TOKENSPEED_D8(40)
#define TOKENSPEED_SUMS_64 \
  TOKENSPEED_SUMS_48, \
  TOKENSPEED_D8(48), TOKENSPEED_D8(56)
#define TOKENSPEED_SUMS_96 \
  TOKENSPEED_SUMS_64, \
  TOKENSPEED_D8(64), TOKENSPEED_D8(72), TOKENSPEED_D8(80), TOKENSPEED_D8(88)
#define TOKENSPEED_SUMS_128 \
  TOKENSPEED_SUMS_96, \
  TOKENSPEED_D8(96), TOKENSPEED_D8(104), TOKENSPEED_D8(112), TOKENSPEED_D8(120)

// d [64, N] = a [64, 16] @ b [N, 16].T, added to d if `add`; both operands in shared memory. SUMS:
// accumulators of a thread, half of N. A, B, ADD: numbers of the operands after those.
#define TOKENSPEED_MULTIPLY_SHARED(N, SUMS, A, B, ADD)                                         \
  __device__ inline void MultiplyShared(float (&d)[SUMS], uint64_t a, uint64_t b, int add) {   \
    asm volatile(                                                                              \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                 \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TOKENSPEED_NAMES_##SUMS   \
        "}, %" #A ", %" #B ", add, 1, 1, 0, 0;\n}\n"                                           \
        : TOKENSPEED_SUMS_##SUMS                                                               \
        : "l"(a), "l"(b), "r"(add));                                                           \
  }
TOKENSPEED_MULTIPLY_SHARED(32, 16, 16, 17, 18)
TOKENSPEED_MULTIPLY_SHARED(48, 24, 24, 25, 26)
TOKENSPEED_MULTIPLY_SHARED(64, 32, 32, 33, 34)
TOKENSPEED_MULTIPLY_SHARED(96, 48, 48, 49, 50)
TOKENSPEED_MULTIPLY_SHARED(128, 64, 64, 65, 66)
TOKENSPEED_MULTIPLY_SHARED(192, 96, 96, 97, 98)
#undef TOKENSPEED_MULTIPLY_SHARED

// d [64, N] += a [64, 16] @ b [16, N]; a in registers, b's columns side by side in shared memory.
#define TOKENSPEED_MULTIPLY_REGISTERS(N, SUMS, A0, A1, A2, A3, B, ADD)                         \
  __device__ inline void MultiplyRegisters(float (&d)[SUMS], const uint32_t (&a)[4],           \
                                           uint64_t b, int add) {                              \
    asm volatile(                                                                              \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                 \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TOKENSPEED_NAMES_##SUMS   \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1, 1;\n}\n"             \
        : TOKENSPEED_SUMS_##SUMS                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                       \
  }
TOKENSPEED_MULTIPLY_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37)
TOKENSPEED_MULTIPLY_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69)
TOKENSPEED_MULTIPLY_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133)
#undef TOKENSPEED_MULTIPLY_REGISTERS
// clang-format on

// d [64, 16] = a [64, 16] @ b [16, 16].T, added to d if `add`; a in registers, b in shared memory.
__device__ inline void MultiplyRows(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, add, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

}  // namespace tokenspeed::hopper
