// SPDX-License-Identifier: MIT
//
// out = x @ weight.T for many rows of x on Hopper, plain or as silu(gate) * up.
//
// A tile is 256 rows of x by 192 of the weight. Two blocks of a cluster work on neighbours that
// share the rows of x: each copies half of them to both. A block stays and takes tile after tile,
// in an order in which tiles that run together read the same rows; one thread copies, two
// warpgroups multiply 128 rows of x each. An output is one sum over K in order, so its bits depend
// on its own row of x alone. Launched by gemm/cuda_wide.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/products.cuh"

namespace tokenspeed {

using namespace hopper;

struct WideShape {
  int tokens;
  int outputs;
  int inputs;
  int band;  // tiles of x that are walked before the next columns' begin again
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kRows = 256;
constexpr int kColumns = 192;  // of the weight
constexpr int kHalfRows = kRows / 2;
constexpr int kXBytes = kRows * kPanelRow;
constexpr int kStageBytes = kXBytes + kColumns * kPanelRow;
constexpr int kStages = 4;
constexpr int kConsumers = 256;  // threads

// Which tiles a block works on: pairs of tiles, one for each block of the cluster.
template <int OUTPUTS>  // of a tile
struct Walk {
  int down;
  int across;  // pairs
  int band;

  __device__ explicit Walk(const WideShape& shape) : band(shape.band) {
    down = (shape.tokens + kRows - 1) / kRows;
    across = (shape.outputs + 2 * OUTPUTS - 1) / (2 * OUTPUTS);
  }
  __device__ int count() const { return down * across; }
  // The first row of x and the first output of this block's tile.
  __device__ int2 At(int pair, int rank) const {
    const int before = pair / (band * across) * band;
    const int here = min(down - before, band);
    const int inside = pair - before * across;
    return make_int2((before + inside % here) * kRows, (inside / here * 2 + rank) * OUTPUTS);
  }
};

template <bool GATED>
struct WideProducer {
  const CUtensorMap* x_map;       // boxes of kHalfRows
  const CUtensorMap* weight_map;  // boxes of kColumns, or of half where gated
  uint8_t* ring;
  uint64_t* full;
  int outputs;
  int rank;

  __device__ void Weight(int2 at, int chunk, int stage) const {
    uint8_t* to = ring + stage * kStageBytes + kXBytes;
    ArriveExpecting(&full[stage], kStageBytes);
    CopyBox(to, weight_map, chunk * kPanel, at.y, &full[stage]);
    if (GATED)
      CopyBox(to + kColumns / 2 * kPanelRow, weight_map, chunk * kPanel, outputs + at.y,
              &full[stage]);
  }
  __device__ void X(int2 at, int chunk, int stage) const {
    uint8_t* to = ring + stage * kStageBytes + rank * kHalfRows * kPanelRow;
    CopyBoxToBoth(to, x_map, chunk * kPanel, at.x + rank * kHalfRows, &full[stage]);
  }
  // One thread. The first weights are copied before the kernels ahead are done.
  template <typename WALK>
  __device__ void Run(const WALK& walk, int chunks, uint64_t* empty) const {
    const int first = blockIdx.x / 2, clusters = gridDim.x / 2;
    const int prefix = min(chunks, kStages);
    const int2 start = walk.At(first, rank);
    for (int i = 0; i < prefix; ++i) Weight(start, i, i);
    PrefetchMap(x_map);
    WaitForPrevious();
    for (int i = 0; i < prefix; ++i) X(start, i, i);
    int stage = prefix % kStages;
    uint32_t parity = prefix == kStages ? 0 : 1;
    for (int pair = first; pair < walk.count(); pair += clusters) {
      const int2 at = walk.At(pair, rank);
      for (int chunk = pair == first ? prefix : 0; chunk < chunks; ++chunk) {
        Wait(&empty[stage], parity);
        Weight(at, chunk, stage);
        X(at, chunk, stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
  }
};

// Both blocks of the cluster fill this stage of each other.
__device__ inline void Release(uint64_t* barrier) {
  if ((threadIdx.x & 127) < 2) ArriveInBlock(barrier, threadIdx.x & 127);
}

// d: the sums of a warpgroup's 128 rows.
__device__ inline void WideProducts(float (&d)[2][kColumns / 2], const uint8_t* ring, int chunks,
                                    int& stage, uint32_t& parity, uint64_t* full, uint64_t* empty) {
  const int first_row = (threadIdx.x >> 7) * kHalfRows;
  int last = 0;
  for (int i = 0; i < chunks; ++i) {
    Wait(&full[stage], parity);
    BeginProducts();
    const uint8_t* x = ring + stage * kStageBytes;
    const uint64_t a = Operand(x + first_row * kPanelRow, 16, kEightRows);
    const uint64_t b = Operand(x + kXBytes, 16, kEightRows);
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 columns, 32 bytes
      MultiplyShared(d[0], a + k * 2, b + k * 2, i + k > 0);
      MultiplyShared(d[1], a + (64 * kPanelRow >> 4) + k * 2, b + k * 2, i + k > 0);
    }
    CommitProducts();
    if (i > 0) {
      WaitProducts<1>();
      Release(&empty[last]);
    }
    last = stage;
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  WaitProducts<0>();
  Release(&empty[last]);
  Pin(d[0]);
  Pin(d[1]);
}

template <bool GATED, typename Out>
__device__ inline void WideGemm(const CUtensorMap* x_map, const CUtensorMap* weight_map,
                                const __nv_bfloat16* bias, Out* out, const WideShape& shape) {
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) InitBarrier(&full[i], 1), InitBarrier(&empty[i], 4);
    FenceBarriers();
  }
  ClusterSync();
  LaunchDependents();

  uint8_t* ring = shared + (-SharedAddress(shared) & (kEightRows - 1));
  const int rank = static_cast<int>(ClusterRank());
  const Walk<GATED ? kColumns / 2 : kColumns> walk(shape);
  const int chunks = (shape.inputs + kPanel - 1) / kPanel;
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<40>();
    const WideProducer<GATED> producer = {x_map, weight_map, ring, full, shape.outputs, rank};
    if (threadIdx.x == kConsumers) producer.Run(walk, chunks, empty);
    __syncwarp();
  } else {
    TakeRegisters<232>();
    WaitForPrevious();
    const Output<Out> output = {out, bias, shape.tokens, shape.outputs};
    int stage = 0;
    uint32_t parity = 0;
    for (int pair = blockIdx.x / 2; pair < walk.count(); pair += gridDim.x / 2) {
      const int2 at = walk.At(pair, rank);
      const int row = at.x + (threadIdx.x >> 7) * kHalfRows;
      float d[2][kColumns / 2];
      WideProducts(d, ring, chunks, stage, parity, full, empty);
      StoreTile<kColumns, GATED>(d[0], row, at.y, output);
      StoreTile<kColumns, GATED>(d[1], row + 64, at.y, output);
    }
  }
  ClusterSync();  // the other block may still signal this one's barriers
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace tokenspeed

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TOKENSPEED_WIDE_BODY(GATED, OUT) \
  tokenspeed::WideGemm<GATED, OUT>(&x_map, &weight_map, bias, out, shape);
#else
#define TOKENSPEED_WIDE_BODY(...)
#endif

#define TOKENSPEED_WIDE(NAME, GATED, OUT)                                                        \
  extern "C" __global__ void TOKENSPEED_CLUSTER(2) __launch_bounds__(384, 1) wide_gemm_##NAME(   \
      const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map, \
      const __nv_bfloat16* bias, OUT* out, const tokenspeed::WideShape shape) {                  \
    TOKENSPEED_WIDE_BODY(GATED, OUT)                                                             \
  }

TOKENSPEED_WIDE(linear, false, __nv_bfloat16)
TOKENSPEED_WIDE(gated, true, __nv_bfloat16)
TOKENSPEED_WIDE(logits, false, float)
