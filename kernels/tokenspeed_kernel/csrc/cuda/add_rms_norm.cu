// SPDX-License-Identifier: MIT
//
// Residual addition fused with RMSNorm: residual += x; out = residual / rms(residual) * weight.
//
// One block a row. The sum stays in registers between the two passes over the row, so each input is
// read once and each output written once; the weight is on its way before the kernel ahead has
// ended. Launched by norm/cuda_norm.py, which checks alignment and picks the variant: PACKS is the
// number of 16-byte packs a thread owns. Never reads past `num_packs` packs of a row.
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

template <typename T, int PACKS>
__device__ void AddRmsNorm(const T* x, T* residual, const T* weight, T* out, int64_t x_stride,
                           int num_packs, float inverse_hidden, float eps) {
  constexpr int kSize = Pack<T>::kSize;
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const T* x_row = x + row * x_stride;
  const int64_t first = row * num_packs;

  LaunchDependents();
  Pack<T> gain[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack < num_packs) gain[i] = LoadPack(weight, pack);
  }
  WaitForPrevious();
  Pack<T> added[PACKS];
  Pack<T> before[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {  // every load is in flight before the first use
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack < num_packs) {
      added[i] = LoadPack(x_row, pack);
      before[i] = LoadPack(residual, first + pack);
    }
  }
  float total[PACKS][kSize];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack < num_packs) {
      Pack<T> sum;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        total[i][j] = ToFloat(added[i].values[j]) + ToFloat(before[i].values[j]);
        squares += total[i][j] * total[i][j];
        sum.values[j] = FromFloat<T>(total[i][j]);
      }
      StorePack(residual, first + pack, sum);
    }
  }
  const float scale = rsqrtf(BlockSum(squares, scratch) * inverse_hidden + eps);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int pack = threadIdx.x + i * blockDim.x;
    if (pack < num_packs) {
      Pack<T> normed;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        normed.values[j] = FromFloat<T>(total[i][j] * scale * ToFloat(gain[i].values[j]));
      }
      StorePack(out, first + pack, normed);
    }
  }
}

}  // namespace tokenspeed

#define TOKENSPEED_ADD_RMS_NORM(SUFFIX, TYPE, PACKS)                                   \
  extern "C" __global__ void __launch_bounds__(1024) add_rms_norm_##SUFFIX##_##PACKS(  \
      const TYPE* x, TYPE* residual, const TYPE* weight, TYPE* out, int64_t x_stride,  \
      int num_packs, float inverse_hidden, float eps) {                                \
    tokenspeed::AddRmsNorm<TYPE, PACKS>(x, residual, weight, out, x_stride, num_packs, \
                                        inverse_hidden, eps);                          \
  }

TOKENSPEED_ADD_RMS_NORM(f32, float, 1)
TOKENSPEED_ADD_RMS_NORM(f32, float, 2)
TOKENSPEED_ADD_RMS_NORM(f32, float, 4)
TOKENSPEED_ADD_RMS_NORM(f16, __half, 1)
TOKENSPEED_ADD_RMS_NORM(f16, __half, 2)
TOKENSPEED_ADD_RMS_NORM(f16, __half, 4)
TOKENSPEED_ADD_RMS_NORM(bf16, __nv_bfloat16, 1)
TOKENSPEED_ADD_RMS_NORM(bf16, __nv_bfloat16, 2)
TOKENSPEED_ADD_RMS_NORM(bf16, __nv_bfloat16, 4)
