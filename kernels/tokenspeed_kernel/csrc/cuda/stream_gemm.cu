// SPDX-License-Identifier: MIT
//
// out = x @ weight.T for up to 192 rows of x on Hopper: the weight streams once through shared
// memory, by bulk copies that start before the kernels ahead in the stream are done.
//
// A block has N rows of the weight (with a gate, N / 2 of the gate and their partners of up) and
// all rows of x; where there are too few such blocks, the blocks of a cluster split K and add up
// their sums, in order, through each other's shared memory. So an output's bits depend on its own
// row of x and on the split alone. One warp copies, a warpgroup for every 64 rows of x multiplies.
// Launched by gemm/cuda_stream.py, which picks N and the split.
#include "kernels/tokenspeed_kernel/csrc/cuda/products.cuh"

namespace tokenspeed {

using namespace hopper;

struct StreamShape {
  int tokens;
  int outputs;
  int inputs;
  int x_rows;  // of a box of x: tokens, rounded up to eight
  int stages;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kMaxStages = 32;

// Shared memory: `stages` pieces of x, then as many of the weight. A warpgroup reads 64 rows of x,
// past the piece's end where x has fewer: those sums are not stored.
template <int N, int PANELS>
struct StreamRing {
  uint8_t* base;
  int x_panel;  // bytes
  int stages;

  static constexpr int kWeightPanel = N * kPanelRow;
  __device__ int stage_bytes() const { return PANELS * (x_panel + kWeightPanel); }
  __device__ uint8_t* x(int stage, int panel) const {
    return base + (stage * PANELS + panel) * x_panel;
  }
  __device__ uint8_t* weight(int stage, int panel) const {
    return base + stages * PANELS * x_panel + (stage * PANELS + panel) * kWeightPanel;
  }
};

template <int N, int PANELS, bool GATED>
struct StreamProducer {
  const CUtensorMap* x_map;
  const CUtensorMap* weight_map;
  StreamRing<N, PANELS> ring;
  uint64_t* full;
  int first_row;  // of the weight
  int outputs;
  int first_chunk;

  __device__ void Weight(int chunk, int stage) const {
    ArriveExpecting(&full[stage], ring.stage_bytes());
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      const int column = ((first_chunk + chunk) * PANELS + panel) * kPanel;
      CopyBox(ring.weight(stage, panel), weight_map, column, first_row, &full[stage]);
      if (GATED)
        CopyBox(ring.weight(stage, panel) + N / 2 * kPanelRow, weight_map, column,
                outputs + first_row, &full[stage]);
    }
  }
  __device__ void X(int chunk, int stage) const {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      CopyBox(ring.x(stage, panel), x_map, ((first_chunk + chunk) * PANELS + panel) * kPanel, 0,
              &full[stage]);
  }
  // One thread. Weights before the kernels ahead are done, x after.
  __device__ void Run(int chunks, uint64_t* empty) const {
    const int prefix = min(chunks, ring.stages);
    for (int i = 0; i < prefix; ++i) Weight(i, i);
    PrefetchMap(x_map);
    WaitForPrevious();
    for (int i = 0; i < prefix; ++i) X(i, i);
    int stage = 0;
    uint32_t parity = 0;
    for (int i = prefix; i < chunks; ++i) {
      Wait(&empty[stage], parity);
      Weight(i, stage);
      X(i, stage);
      if (++stage == ring.stages) stage = 0, parity ^= 1;
    }
  }
};

template <int N, int PANELS>
__device__ inline void StreamProducts(float (&d)[N / 2], const StreamRing<N, PANELS>& ring,
                                      int chunks, int first_row, uint64_t* full, uint64_t* empty) {
  int stage = 0, last = 0;
  uint32_t parity = 0;
  for (int i = 0; i < chunks; ++i) {
    Wait(&full[stage], parity);
    BeginProducts();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      const uint64_t a = Operand(ring.x(stage, panel) + first_row * kPanelRow, 16, kEightRows);
      const uint64_t b = Operand(ring.weight(stage, panel), 16, kEightRows);
#pragma unroll
      for (int k = 0; k < 4; ++k)  // 16 columns, 32 bytes
        MultiplyShared(d, a + k * 2, b + k * 2, i + panel + k > 0);
    }
    CommitProducts();
    if (i > 0) {
      WaitProducts<1>();
      if ((threadIdx.x & 127) == 0) Arrive(&empty[last]);
    }
    last = stage;
    if (++stage == ring.stages) stage = 0, parity ^= 1;
  }
  WaitProducts<0>();
  Pin(d);
}

// Columns of a row of sums in shared memory; the padding spreads rows over the banks.
template <int N>
constexpr int kSumStride = N + 8;

template <int N>
__device__ inline void KeepSums(const float (&d)[N / 2], float* sums, int row, int rows) {
  const int lane = threadIdx.x & 31;
  row += (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 >= rows) continue;
    float* to = sums + (row + half * 8) * kSumStride<N> + (lane & 3) * 2;
#pragma unroll
    for (int eight = 0; eight < N / 8; ++eight)
      StorePair(to + eight * 8, d[eight * 4 + half * 2], d[eight * 4 + half * 2 + 1]);
  }
}

template <int SPLIT>
__device__ inline float4 AddedUp(uint32_t local) {
  float4 parts[SPLIT];
#pragma unroll
  for (int rank = 0; rank < SPLIT; ++rank) parts[rank] = LoadInBlock(local, rank);
#pragma unroll
  for (int rank = 1; rank < SPLIT; ++rank) {
    parts[0].x += parts[rank].x;
    parts[0].y += parts[rank].y;
    parts[0].z += parts[rank].z;
    parts[0].w += parts[rank].w;
  }
  return parts[0];
}

// Four neighbouring outputs, from the sums of the cluster's blocks.
template <int N, int SPLIT, bool GATED, typename Out>
__device__ inline void StoreFour(uint32_t sums, int row, int local, int column,
                                 const Output<Out>& output) {
  const uint32_t at = sums + (row * kSumStride<N> + local) * 4;
  const float4 first = AddedUp<SPLIT>(at);
  float values[4] = {first.x, first.y, first.z, first.w};
  float ups[4] = {};
  if (GATED) {
    const float4 second = AddedUp<SPLIT>(at + N / 2 * 4);
    ups[0] = second.x, ups[1] = second.y, ups[2] = second.z, ups[3] = second.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (output.bias != nullptr) {
      values[i] += ToFloat(output.bias[column + i]);
      if (GATED) ups[i] += ToFloat(output.bias[output.columns + column + i]);
    }
    if (GATED) values[i] = SiluAndMul(values[i], ups[i]);
  }
  Out* to = output.out + static_cast<int64_t>(row) * output.columns + column;
  StorePair(to, values[0], values[1]);
  StorePair(to + 2, values[2], values[3]);
}

template <int N, int SPLIT, bool GATED, int THREADS, typename Out>
__device__ inline void StoreShare(const float* sums, int column, const Output<Out>& output) {
  constexpr int kFours = N / (GATED ? 2 : 1) / SPLIT / 4;  // of a block's share of a row
  const int share = static_cast<int>(ClusterRank()) * kFours * 4;
  for (int i = threadIdx.x; i < output.rows * kFours; i += THREADS) {
    const int local = share + i % kFours * 4;
    if (column + local < output.columns)
      StoreFour<N, SPLIT, GATED>(SharedAddress(sums), i / kFours, local, column + local, output);
  }
}

template <int GROUPS, int N, int PANELS, int SPLIT, bool GATED, typename Out>
__device__ inline void StreamGemm(const CUtensorMap* x_map, const CUtensorMap* weight_map,
                                  const __nv_bfloat16* bias, Out* out, const StreamShape& shape) {
  constexpr int kColumns = GATED ? N / 2 : N;
  constexpr int kConsumers = GROUPS * 128;
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  if (threadIdx.x == 0) {
    for (int i = 0; i < shape.stages; ++i) InitBarrier(&full[i], 1), InitBarrier(&empty[i], GROUPS);
    FenceBarriers();
  }
  __syncthreads();
  LaunchDependents();

  StreamRing<N, PANELS> ring;
  ring.base = shared + (-SharedAddress(shared) & (kEightRows - 1));
  ring.x_panel = shape.x_rows * kPanelRow;
  ring.stages = shape.stages;
  const int column = blockIdx.x / SPLIT * kColumns;
  const int rank = blockIdx.x % SPLIT;
  const int all = (shape.inputs + PANELS * kPanel - 1) / (PANELS * kPanel);
  const int first = all * rank / SPLIT, chunks = all * (rank + 1) / SPLIT - first;
  const Output<Out> output = {out, bias, shape.tokens, shape.outputs};
  float* sums = reinterpret_cast<float*>(ring.base);

  if (threadIdx.x >= kConsumers) {
    const StreamProducer<N, PANELS, GATED> producer = {x_map,  weight_map,    ring, full,
                                                       column, shape.outputs, first};
    if (threadIdx.x == kConsumers) producer.Run(chunks, empty);
    __syncwarp();
    if (SPLIT > 1) {
      ClusterSync();
      ClusterSync();
    }
    return;
  }
  const int row = (threadIdx.x >> 7) * 64;
  float d[N / 2];
  WaitForPrevious();
  StreamProducts<N, PANELS>(d, ring, chunks, row, full, empty);
  if constexpr (SPLIT == 1) {
    StoreTile<N, GATED>(d, row, column, output);
  } else {
    Sync<1, kConsumers>();  // nobody multiplies any more: the ring becomes the sums
    KeepSums<N>(d, sums, row, shape.tokens);
    ClusterSync();
    StoreShare<N, SPLIT, GATED, kConsumers>(sums, column, output);
    ClusterSync();  // the others read this block's sums
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace tokenspeed

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TOKENSPEED_STREAM_BODY(GROUPS, N, PANELS, SPLIT, GATED, OUT)                           \
  tokenspeed::StreamGemm<GROUPS, N, PANELS, SPLIT, GATED, OUT>(&x_map, &weight_map, bias, out, \
                                                               shape);
#else
#define TOKENSPEED_STREAM_BODY(...)
#endif

#define TOKENSPEED_STREAM(NAME, GROUPS, N, PANELS, SPLIT, GATED, OUT)                              \
  extern "C" __global__ void TOKENSPEED_CLUSTER(SPLIT)                                             \
      __launch_bounds__(GROUPS * 128 + 32, GROUPS == 1 ? 2 : 1)                                    \
          stream_gemm_##NAME##_##GROUPS##_##N##x##PANELS##_##SPLIT(                                \
              const __grid_constant__ CUtensorMap x_map,                                           \
              const __grid_constant__ CUtensorMap weight_map, const __nv_bfloat16* bias, OUT* out, \
              const tokenspeed::StreamShape shape) {                                               \
    TOKENSPEED_STREAM_BODY(GROUPS, N, PANELS, SPLIT, GATED, OUT)                                   \
  }
#define TOKENSPEED_LINEAR(GROUPS, N, PANELS, SPLIT) \
  TOKENSPEED_STREAM(linear, GROUPS, N, PANELS, SPLIT, false, __nv_bfloat16)
#define TOKENSPEED_GATED(GROUPS, N) TOKENSPEED_STREAM(gated, GROUPS, N, 1, 1, true, __nv_bfloat16)
#define TOKENSPEED_LOGITS(GROUPS, N) TOKENSPEED_STREAM(logits, GROUPS, N, 1, 1, false, float)

// The same list as CUTS of gemm/cuda_stream.py.
TOKENSPEED_LINEAR(1, 32, 4, 1)
TOKENSPEED_LINEAR(1, 48, 2, 1)
TOKENSPEED_LINEAR(1, 64, 2, 1)
TOKENSPEED_LINEAR(1, 96, 1, 1)
TOKENSPEED_LINEAR(1, 64, 2, 2)
TOKENSPEED_LINEAR(1, 96, 1, 2)
TOKENSPEED_LINEAR(2, 32, 2, 1)
TOKENSPEED_LINEAR(2, 64, 1, 1)
TOKENSPEED_LINEAR(2, 128, 1, 1)
TOKENSPEED_LINEAR(2, 64, 1, 2)
TOKENSPEED_LINEAR(2, 96, 1, 2)
TOKENSPEED_LINEAR(2, 64, 1, 4)
TOKENSPEED_LINEAR(3, 64, 1, 1)
TOKENSPEED_LINEAR(3, 128, 1, 1)
TOKENSPEED_LINEAR(3, 64, 1, 2)
TOKENSPEED_LINEAR(3, 96, 1, 2)
TOKENSPEED_LINEAR(3, 64, 1, 4)
TOKENSPEED_GATED(1, 64)
TOKENSPEED_GATED(1, 96)
TOKENSPEED_GATED(1, 192)
TOKENSPEED_GATED(2, 96)
TOKENSPEED_GATED(2, 192)
TOKENSPEED_GATED(3, 96)
TOKENSPEED_GATED(3, 192)
TOKENSPEED_LOGITS(1, 64)
TOKENSPEED_LOGITS(1, 192)
TOKENSPEED_LOGITS(2, 128)
TOKENSPEED_LOGITS(3, 128)
