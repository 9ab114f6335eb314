// SPDX-License-Identifier: MIT
//
// Between the qkv projection and attention, in one pass: RMSNorm of every query and key head where
// the model has it, rotation by the token's position, and the write of keys and values to their
// slots of the paged cache. Queries are changed in place; keys and values are read once.
//
// One warp a head of a token. A lane holds neighbours in the low half of the head and the elements
// that they rotate with in the high half, so nothing crosses lanes but the sum of squares. Launched
// by rope/cuda_norm_store.py, which checks shapes, strides and alignment. Whole heads rotate.
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

struct HeadsShape {
  int num_tokens;
  int num_heads;
  int num_kv_heads;
  int block_size;
  int64_t q_stride;  // between tokens, in elements; heads of a token are adjacent
  int64_t k_stride;
  int64_t v_stride;
};

template <typename T, int PAIRS>
struct alignas(PAIRS * sizeof(T)) Some {
  T values[PAIRS];
};

template <typename T, int PAIRS>
__device__ inline void LoadHalf(const T* from, float (&to)[PAIRS]) {
  const auto some = *reinterpret_cast<const Some<T, PAIRS>*>(from);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) to[i] = ToFloat(some.values[i]);
}

template <typename T, int PAIRS>
__device__ inline void StoreHalf(T* to, const float (&from)[PAIRS]) {
  Some<T, PAIRS> some;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) some.values[i] = FromFloat<T>(from[i]);
  *reinterpret_cast<Some<T, PAIRS>*>(to) = some;
}

template <typename T, typename W, int PAIRS>
__device__ inline void Normalize(const W* weight, float eps, int lane, float (&low)[PAIRS],
                                 float (&high)[PAIRS]) {
  constexpr int kHalf = PAIRS * 32;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) squares += low[i] * low[i] + high[i] * high[i];
  const float scale = rsqrtf(WarpSum(squares) * (1.0f / (2 * kHalf)) + eps);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    low[i] *= scale * ToFloat(weight[lane * PAIRS + i]);
    high[i] *= scale * ToFloat(weight[kHalf + lane * PAIRS + i]);
  }
}

// PAIRS: a 64th of the head size. W: type of the norms' weights; q_norm null means no norms.
template <typename T, typename W, int PAIRS>
__device__ void NormRopeStore(T* q, const T* k, const T* v, const W* q_norm, const W* k_norm,
                              float eps, const int64_t* positions, const float* cos_sin, T* k_cache,
                              T* v_cache, const int64_t* slots, HeadsShape shape) {
  constexpr int kHalf = PAIRS * 32;
  constexpr int kHead = 2 * kHalf;
  const int lane = threadIdx.x & 31;
  const int heads = shape.num_heads + 2 * shape.num_kv_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> 5) + (threadIdx.x >> 5);
  const int64_t token = item / heads;
  int head = static_cast<int>(item - token * heads);
  LaunchDependents();
  WaitForPrevious();
  if (token >= shape.num_tokens) return;

  const bool is_query = head < shape.num_heads;
  const bool is_value = head >= shape.num_heads + shape.num_kv_heads;
  const T* from;
  T* to;
  if (is_query) {
    to = q + token * shape.q_stride + head * kHead;
    from = to;
  } else {
    head -= is_value ? shape.num_heads + shape.num_kv_heads : shape.num_heads;
    from = is_value ? v + token * shape.v_stride : k + token * shape.k_stride;
    from += head * kHead;
    const int64_t slot = slots[token];
    const int64_t block = slot / shape.block_size;
    const int64_t offset = slot - block * shape.block_size;
    to = (is_value ? v_cache : k_cache) +
         ((block * shape.num_kv_heads + head) * shape.block_size + offset) * kHead;
  }
  float low[PAIRS], high[PAIRS];
  LoadHalf(from + lane * PAIRS, low);
  LoadHalf(from + kHalf + lane * PAIRS, high);
  if (!is_value) {
    if (q_norm != nullptr) Normalize<T>(is_query ? q_norm : k_norm, eps, lane, low, high);
    const float* turn = cos_sin + positions[token] * kHead + lane * PAIRS;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float cosine = turn[i], sine = turn[kHalf + i];
      const float turned = low[i] * cosine - high[i] * sine;
      high[i] = high[i] * cosine + low[i] * sine;
      low[i] = turned;
    }
  }
  StoreHalf(to + lane * PAIRS, low);
  StoreHalf(to + kHalf + lane * PAIRS, high);
}

}  // namespace tokenspeed

#define TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, PAIRS)                                  \
  extern "C" __global__ void __launch_bounds__(256) norm_rope_store_##NAME##_##PAIRS(          \
      TYPE* q, const TYPE* k, const TYPE* v, const WEIGHT* q_norm, const WEIGHT* k_norm,       \
      float eps, const int64_t* positions, const float* cos_sin, TYPE* k_cache, TYPE* v_cache, \
      const int64_t* slots, int num_tokens, int num_heads, int num_kv_heads, int block_size,   \
      int64_t q_stride, int64_t k_stride, int64_t v_stride) {                                  \
    tokenspeed::NormRopeStore<TYPE, WEIGHT, PAIRS>(                                            \
        q, k, v, q_norm, k_norm, eps, positions, cos_sin, k_cache, v_cache, slots,             \
        {num_tokens, num_heads, num_kv_heads, block_size, q_stride, k_stride, v_stride});      \
  }

#define TOKENSPEED_NORM_ROPE_STORE_SIZES(NAME, TYPE, WEIGHT) \
  TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, 1)          \
  TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, 2)          \
  TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, 4)

TOKENSPEED_NORM_ROPE_STORE_SIZES(bf16, __nv_bfloat16, __nv_bfloat16)
TOKENSPEED_NORM_ROPE_STORE_SIZES(bf16_f32, __nv_bfloat16, float)
TOKENSPEED_NORM_ROPE_STORE_SIZES(f16, __half, __half)
TOKENSPEED_NORM_ROPE_STORE_SIZES(f16_f32, __half, float)
