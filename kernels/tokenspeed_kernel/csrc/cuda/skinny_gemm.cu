// SPDX-License-Identifier: MIT
//
// out = x @ weight.T for up to eight rows of x: reading the weight is the work, so it is read once,
// in 16-byte pieces that go straight into the matrix units' operands.
//
// A block owns 16 rows of the weight (8 where there are too few for all cores, or 8 of the gate and
// their 8 partners of the up projection); its warps split K in chunks of 128, or of 256 where a row
// is long and eight rows leave the registers, and add up in order through shared memory, so an
// output's bits depend on its own row of x alone. The products run on
// mma.m16n8k16 with the weight as the left operand. K is permuted within 32 the same way on both
// sides: a lane's 16 bytes serve two products. Loads of the weight start before the kernels ahead
// in the stream are done. Launched by gemm/cuda_skinny.py, which checks shapes and alignment.
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kChunk = 128;  // of K, per warp and iteration; twice that in deep ones
constexpr int kMaxWarps = 8;
constexpr int kTile = 16 * 8;  // outputs of one product

enum Rows { kSixteen = 0, kEight = 1, kGated = 2, kEightDeep = 3 };

__host__ __device__ constexpr bool OwnsEight(Rows rows) {
  return rows == kEight || rows == kEightDeep;
}
__host__ __device__ constexpr int StepsOf(Rows rows) {
  return (rows == kEightDeep ? 2 : 1) * kChunk / 32;
}

__device__ inline uint4 Zero4() { return make_uint4(0, 0, 0, 0); }

__device__ inline void Multiply(__nv_bfloat16, float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void Multiply(__half, float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The two rows of the weight that a lane reads, and one chunk of them.
template <typename T, Rows ROWS>
struct WeightRows {
  const T* low;
  const T* high;
  uint4 a[StepsOf(ROWS)];
  uint4 b[StepsOf(ROWS)];

  // `at`: the lane's first element of a step. Past the end of K there are zeros.
  __device__ void Load(int step, int at, int num_inputs) {
    a[step] = at < num_inputs ? LoadStreamed16(low + at) : Zero4();
    if (!OwnsEight(ROWS)) b[step] = at < num_inputs ? LoadStreamed16(high + at) : Zero4();
  }
};

struct SkinnyShape {
  int num_tokens;
  int num_outputs;  // of the result; with kGated the weight has twice as many rows
  int num_inputs;
  int64_t x_stride;
};

template <typename T, typename Out, Rows ROWS>
__device__ void SkinnyGemm(const T* x, const T* weight, const T* bias, Out* out,
                           SkinnyShape shape) {
  constexpr int kOwned = ROWS == kSixteen ? 16 : 8;  // outputs of a block
  constexpr int kSteps = StepsOf(ROWS);
  __shared__ float partial[kMaxWarps * kTile];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int num_warps = blockDim.x >> 5;
  const int group = lane >> 2;
  const int lane_k = (lane & 3) * 8;
  const int first = blockIdx.x * kOwned;
  const int64_t inputs = shape.num_inputs;

  // Rows past the last repeat it; what they give is not stored.
  const int last = shape.num_outputs - 1;
  WeightRows<T, ROWS> rows;
  rows.low = weight + min(first + group, last) * inputs;
  rows.high = ROWS == kGated ? rows.low + shape.num_outputs * inputs
                             : weight + min(first + 8 + group, last) * inputs;
  int k = warp * kSteps * 32 + lane_k;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) rows.Load(step, k + step * 32, shape.num_inputs);
  LaunchDependents();
  WaitForPrevious();

  float sum[4] = {};
  const T* token = group < shape.num_tokens ? x + group * shape.x_stride : nullptr;
  const int stride = num_warps * kSteps * 32;
  for (; k - lane_k < shape.num_inputs; k += stride) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = k + step * 32;
      const uint4 a = rows.a[step];
      const uint4 b = OwnsEight(ROWS) ? Zero4() : rows.b[step];
      uint4 v = Zero4();
      if (token != nullptr && at < shape.num_inputs)
        v = *reinterpret_cast<const uint4*>(token + at);
      Multiply(T(), sum, a.x, b.x, a.y, b.y, v.x, v.y);
      Multiply(T(), sum, a.z, b.z, a.w, b.w, v.z, v.w);
      rows.Load(step, at + stride, shape.num_inputs);  // in flight while the other steps multiply
    }
  }

  // partial[warp][token][row]
  float* mine = partial + warp * kTile + (lane & 3) * 32 + group;
  mine[0] = sum[0];
  mine[16] = sum[1];
  mine[8] = sum[2];
  mine[24] = sum[3];
  __syncthreads();
  for (int i = threadIdx.x; i < shape.num_tokens * kOwned; i += blockDim.x) {
    const int index = i / kOwned;
    const int row = i % kOwned;
    const float* column = partial + index * 16 + row;
    float low = 0.0f, high = 0.0f;
    for (int part = 0; part < num_warps; ++part) {
      low += column[part * kTile];
      if (ROWS == kGated) high += column[part * kTile + 8];
    }
    const int output = first + row;
    if (output >= shape.num_outputs) continue;
    if (bias != nullptr) {
      low += ToFloat(bias[output]);
      if (ROWS == kGated) high += ToFloat(bias[shape.num_outputs + output]);
    }
    if (ROWS == kGated) low = low / (1.0f + expf(-low)) * high;
    out[static_cast<int64_t>(index) * shape.num_outputs + output] = FromFloat<Out>(low);
  }
}

}  // namespace tokenspeed

#define TOKENSPEED_SKINNY(NAME, TYPE, OUT, ROWS)                                              \
  extern "C" __global__ void __launch_bounds__(256, 4)                                        \
      skinny_gemm_##NAME(const TYPE* x, const TYPE* weight, const TYPE* bias, OUT* out,       \
                         int num_tokens, int num_outputs, int num_inputs, int64_t x_stride) { \
    tokenspeed::SkinnyGemm<TYPE, OUT, tokenspeed::ROWS>(                                      \
        x, weight, bias, out, {num_tokens, num_outputs, num_inputs, x_stride});               \
  }

#define TOKENSPEED_SKINNY_TYPE(NAME, TYPE)                     \
  TOKENSPEED_SKINNY(NAME##_sixteen, TYPE, TYPE, kSixteen)      \
  TOKENSPEED_SKINNY(NAME##_eight, TYPE, TYPE, kEight)          \
  TOKENSPEED_SKINNY(NAME##_deep, TYPE, TYPE, kEightDeep)       \
  TOKENSPEED_SKINNY(NAME##_gated, TYPE, TYPE, kGated)          \
  TOKENSPEED_SKINNY(NAME##_f32_sixteen, TYPE, float, kSixteen) \
  TOKENSPEED_SKINNY(NAME##_f32_eight, TYPE, float, kEight)

TOKENSPEED_SKINNY_TYPE(bf16, __nv_bfloat16)
TOKENSPEED_SKINNY_TYPE(f16, __half)
