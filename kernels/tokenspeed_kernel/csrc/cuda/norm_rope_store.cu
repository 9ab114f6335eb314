// SPDX-License-Identifier: MIT
//
// Between the qkv projection and attention, in one pass: RMSNorm of every query and key head where
// the model has it, rotation by the token's position, and the write of keys and values to their
// slots of the paged cache. Queries are changed in place; keys and values are read once.
//
// A block has one token, or some heads of it. A lane holds eight neighbours in the low half of a
// head and the eight elements that they rotate with in the high half, so nothing crosses lanes but
// the sum of squares; a warp has as many heads as fit it, twice, all of whose loads are in flight
// together. What was there before the step's first kernel (positions, slots, angles) is read before
// the kernel ahead has ended. Launched by rope/cuda_norm_store.py, which checks shapes, strides and
// alignment. Whole heads rotate.
#include "kernels/tokenspeed_kernel/csrc/cuda/vector.cuh"

namespace tokenspeed {

constexpr int kTurns = 2;  // of a warp

struct HeadsShape {
  int num_heads;
  int num_kv_heads;
  int block_size;
  int64_t q_stride;  // between tokens, in elements; heads of a token are adjacent
  int64_t k_stride;
  int64_t v_stride;
};

struct Eight {
  float values[8];
};

template <typename T>
__device__ inline Eight LoadEight(const T* from) {
  constexpr int kSize = Pack<T>::kSize;
  Eight eight;
#pragma unroll
  for (int pack = 0; pack < 8 / kSize; ++pack) {
    const Pack<T> some = LoadPack(from, pack);
#pragma unroll
    for (int i = 0; i < kSize; ++i) eight.values[pack * kSize + i] = ToFloat(some.values[i]);
  }
  return eight;
}

template <typename T>
__device__ inline void StoreEight(T* to, const Eight& eight) {
  Pack<T> some;
#pragma unroll
  for (int i = 0; i < 8; ++i) some.values[i] = FromFloat<T>(eight.values[i]);
  StorePack(to, 0, some);
}

// The sum over neighbouring lanes, so many as share a head.
template <int LANES>
__device__ inline float HeadSum(float value) {
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane >>= 1) {
    value += __shfl_xor_sync(0xffffffffu, value, lane);
  }
  return value;
}

// Where a head of the token comes from and goes to.
template <typename T>
struct HeadPlace {
  const T* from;
  T* to;
  bool is_query;
  bool is_value;
};

template <typename T, int HEAD>
struct Token {
  T* q;
  const T* k;
  const T* v;
  T* k_cache;  // where the token's block begins, less its offset in the block
  T* v_cache;

  __device__ HeadPlace<T> At(int head, const HeadsShape& shape) const {
    if (head < shape.num_heads) return {q + head * HEAD, q + head * HEAD, true, false};
    head -= shape.num_heads;
    const bool is_value = head >= shape.num_kv_heads;
    if (is_value) head -= shape.num_kv_heads;
    const int64_t in_block = static_cast<int64_t>(head) * shape.block_size * HEAD;
    return {(is_value ? v : k) + head * HEAD, (is_value ? v_cache : k_cache) + in_block, false,
            is_value};
  }
};

template <int LANES, typename W>
__device__ inline void Normalize(const W* weight, float eps, float squares, Eight& low,
                                 Eight& high) {
  const float scale = rsqrtf(squares * (1.0f / (16 * LANES)) + eps);
  const Eight low_gain = LoadEight(weight), high_gain = LoadEight(weight + LANES * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low.values[i] *= scale * low_gain.values[i];
    high.values[i] *= scale * high_gain.values[i];
  }
}

__device__ inline void Rotate(const Eight& cosine, const Eight& sine, Eight& low, Eight& high) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float turned = low.values[i] * cosine.values[i] - high.values[i] * sine.values[i];
    high.values[i] = high.values[i] * cosine.values[i] + low.values[i] * sine.values[i];
    low.values[i] = turned;
  }
}

// W: type of the norms' weights; q_norm null means no norms.
template <typename T, typename W, int HEAD>
__device__ void NormRopeStore(T* q, const T* k, const T* v, const W* q_norm, const W* k_norm,
                              float eps, const int64_t* positions, const float* cos_sin, T* k_cache,
                              T* v_cache, const int64_t* slots, HeadsShape shape) {
  constexpr int kLanes = HEAD / 16;  // of a head
  constexpr int kAtOnce = 32 / kLanes;
  const int heads = shape.num_heads + 2 * shape.num_kv_heads;
  const int block_heads = blockDim.x / 32 * (kAtOnce * kTurns);
  const int blocks = (heads + block_heads - 1) / block_heads;  // of a token
  const int64_t token = blockIdx.x / blocks;
  const int column = threadIdx.x % kLanes * 8;
  const int first = blockIdx.x % blocks * block_heads + threadIdx.x / 32 * (kAtOnce * kTurns) +
                    threadIdx.x % 32 / kLanes;

  LaunchDependents();
  const float* angles = cos_sin + __ldcg(positions + token) * HEAD + column;
  const Eight cosine = LoadEight(angles), sine = LoadEight(angles + HEAD / 2);
  const auto slot = static_cast<uint32_t>(__ldcg(slots + token));
  const uint32_t block = slot / shape.block_size, offset = slot - block * shape.block_size;
  const int64_t place =
      (static_cast<int64_t>(block) * shape.num_kv_heads * shape.block_size + offset) * HEAD;
  const Token<T, HEAD> mine = {q + token * shape.q_stride, k + token * shape.k_stride,
                               v + token * shape.v_stride, k_cache + place, v_cache + place};
  WaitForPrevious();

  Eight low[kTurns], high[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int head = first + turn * kAtOnce;
    if (head >= heads) continue;
    const T* from = mine.At(head, shape).from + column;
    low[turn] = LoadEight(from);
    high[turn] = LoadEight(from + HEAD / 2);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int head = first + turn * kAtOnce;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares += low[turn].values[i] * low[turn].values[i];
      squares += high[turn].values[i] * high[turn].values[i];
    }
    squares = HeadSum<kLanes>(squares);
    if (head >= heads) continue;
    const HeadPlace<T> at = mine.At(head, shape);
    if (!at.is_value) {
      if (q_norm != nullptr) {
        const W* weight = at.is_query ? q_norm : k_norm;
        Normalize<kLanes>(weight + column, eps, squares, low[turn], high[turn]);
      }
      Rotate(cosine, sine, low[turn], high[turn]);
    }
    StoreEight(at.to + column, low[turn]);
    StoreEight(at.to + column + HEAD / 2, high[turn]);
  }
}

}  // namespace tokenspeed

#define TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, HEAD)                                   \
  extern "C" __global__ void __launch_bounds__(256, 3) norm_rope_store_##NAME##_##HEAD(        \
      TYPE* q, const TYPE* k, const TYPE* v, const WEIGHT* q_norm, const WEIGHT* k_norm,       \
      float eps, const int64_t* positions, const float* cos_sin, TYPE* k_cache, TYPE* v_cache, \
      const int64_t* slots, int num_heads, int num_kv_heads, int block_size, int64_t q_stride, \
      int64_t k_stride, int64_t v_stride) {                                                    \
    tokenspeed::NormRopeStore<TYPE, WEIGHT, HEAD>(                                             \
        q, k, v, q_norm, k_norm, eps, positions, cos_sin, k_cache, v_cache, slots,             \
        {num_heads, num_kv_heads, block_size, q_stride, k_stride, v_stride});                  \
  }

#define TOKENSPEED_NORM_ROPE_STORE_SIZES(NAME, TYPE, WEIGHT) \
  TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, 64)         \
  TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, 128)        \
  TOKENSPEED_NORM_ROPE_STORE(NAME, TYPE, WEIGHT, 256)

TOKENSPEED_NORM_ROPE_STORE_SIZES(bf16, __nv_bfloat16, __nv_bfloat16)
TOKENSPEED_NORM_ROPE_STORE_SIZES(bf16_f32, __nv_bfloat16, float)
TOKENSPEED_NORM_ROPE_STORE_SIZES(f16, __half, __half)
TOKENSPEED_NORM_ROPE_STORE_SIZES(f16_f32, __half, float)
