// SPDX-License-Identifier: MIT
//
// Linear layers and embedding look-ups on packed weights. Every output is one chain of fused
// multiply-adds over k = 0, 1, 2, ...; only how many outputs run side by side depends on the number
// of tokens. So a row's result does not depend on its batch, on chunking or on threads.
//
// With few tokens weights are dequantised in registers, once for all tokens; with many, a group of
// panels is first dequantised into a buffer that stays in the L2 cache. Included like simd.h.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_LINEAR_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_LINEAR_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/formats.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"
#include "kernels/tokenspeed_kernel/csrc/cpu/vector_math.h"

namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE {
namespace {

// Register blocking. Up to kDirectTokens tokens are multiplied with kTilePanels panels at once and
// up to kTallTokens with one, weights dequantised in registers; more tokens in tiles of kTileTokens
// x kTilePanels from the buffer.
#if defined(__AVX512F__)
constexpr int kTilePanels = 3;
constexpr int kTileTokens = 8;
constexpr int kDirectTokens = 4;
constexpr int kTallTokens = 8;
#elif defined(__AVX2__)
constexpr int kTilePanels = 2;
constexpr int kTileTokens = 3;
constexpr int kDirectTokens = 1;
constexpr int kTallTokens = 4;
#else
constexpr int kTilePanels = 1;
constexpr int kTileTokens = 3;
constexpr int kDirectTokens = 1;
constexpr int kTallTokens = 1;
#endif
// Tokens that one task takes through its panels; a multiple of every kTileTokens.
constexpr int64_t kTaskTokens = 240;

// acc[t][p] = sum over k of x[t][k] * weight of panel p. `ahead`: distance in bytes to the panels
// of the next tile, which are fetched meanwhile; 0 when these come from a buffer.
template <class F, int kTokens, int kPanels>
TS_INLINE void MultiplyTile(const float* x, int64_t x_stride, int64_t k,
                            const uint8_t* const* panels, int64_t block_bytes, int64_t ahead,
                            Vec (&acc)[kTokens][kPanels]) {
  F state[kPanels] = {};
  const uint8_t* at[kPanels];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) at[p] = panels[p];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) acc[t][p] = Zero();
  }
  for (int64_t begin = 0; begin < k; begin += F::kBlock) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      state[p].Begin(at[p]);
      if (ahead != 0) {
        for (int64_t line = 0; line < block_bytes; line += 64) Prefetch(at[p] + ahead + line);
      }
    }
    for (int group = 0; group < F::kBlock / F::kGroup; ++group) {
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) state[p].Group(at[p], group);
      const float* const xs = x + begin + group * F::kGroup;
#pragma GCC unroll 8
      for (int i = 0; i < F::kGroup; ++i) {
        Vec weight[kPanels];
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) weight[p] = state[p].Weight(at[p], group, i);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          const Vec value = Broadcast(xs[t * x_stride + i]);
#pragma GCC unroll 8
          for (int p = 0; p < kPanels; ++p) acc[t][p] = Fma(weight[p], value, acc[t][p]);
        }
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) at[p] += block_bytes;
  }
}

TS_INLINE Vec LoadBias(const LinearArgs& args, int64_t panel) {
  const int64_t first = panel * kPanelRows;
  const int64_t count = args.n - first;
  if (count >= kLanes) return Load(args.bias + first);
  return LoadPart(args.bias + first, static_cast<int>(count), 0.0f);
}

TS_INLINE void StorePanel(const LinearArgs& args, int64_t token, int64_t panel, const Vec& value) {
  const int64_t first = panel * kPanelRows;
  float* const out = args.out + token * args.out_stride + first;
  if (args.n - first >= kLanes) {
    Store(out, value);
  } else {
    StorePart(out, value, static_cast<int>(args.n - first));
  }
}

template <class F, int kTokens, int kPanels>
__attribute__((noinline)) void RunTile(const LinearArgs& args, int64_t token, const int64_t* ids,
                                       const uint8_t* const* panels, int64_t block_bytes,
                                       int64_t ahead) {
  Vec acc[kTokens][kPanels];
  MultiplyTile<F, kTokens, kPanels>(args.x + token * args.x_stride, args.x_stride, args.k, panels,
                                    block_bytes, ahead, acc);
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    if (args.bias != nullptr) {
      const Vec bias = LoadBias(args, ids[p]);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) acc[t][p] = Add(acc[t][p], bias);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) StorePanel(args, token + t, ids[p], acc[t][p]);
  }
}

// Runs `tokens` tokens, 1 <= tokens <= kMost, through the tile of exactly that height.
template <class F, int kMost, int kPanels>
TS_INLINE void RunTokens(int tokens, const LinearArgs& args, int64_t token, const int64_t* ids,
                         const uint8_t* const* panels, int64_t block_bytes, int64_t ahead) {
  if constexpr (kMost > 1) {
    if (tokens < kMost) {
      return RunTokens<F, kMost - 1, kPanels>(tokens, args, token, ids, panels, block_bytes, ahead);
    }
  }
  RunTile<F, kMost, kPanels>(args, token, ids, panels, block_bytes, ahead);
}

// Runs `tokens` tokens through the panels, kPanels at a time and what is left one at a time.
template <class F, int kMost, int kPanels>
TS_INLINE void RunGroup(int num_panels, int tokens, const LinearArgs& args, int64_t token,
                        const int64_t* ids, const uint8_t* const* panels, int64_t block_bytes,
                        int64_t ahead) {
  int p = 0;
  for (; p + kPanels <= num_panels; p += kPanels) {
    RunTokens<F, kMost, kPanels>(tokens, args, token, ids + p, panels + p, block_bytes, ahead);
  }
  if constexpr (kPanels > 1) {
    for (; p < num_panels; ++p) {
      RunTokens<F, kMost, 1>(tokens, args, token, ids + p, panels + p, block_bytes, ahead);
    }
  }
}

// One panel [k][16] as floats. `ahead` as in MultiplyTile.
template <class F>
__attribute__((noinline)) void DequantizePanel(const uint8_t* panel, int64_t k, int64_t block_bytes,
                                               int64_t ahead, float* out) {
  F state;
  for (int64_t begin = 0; begin < k; begin += F::kBlock, panel += block_bytes) {
    state.Begin(panel);
    if (ahead != 0) {
      for (int64_t line = 0; line < block_bytes; line += 64) Prefetch(panel + ahead + line);
    }
    for (int group = 0; group < F::kBlock / F::kGroup; ++group) {
      state.Group(panel, group);
#pragma GCC unroll 8
      for (int i = 0; i < F::kGroup; ++i, out += kLanes) Store(out, state.Weight(panel, group, i));
    }
  }
}

template <WeightFormat kFormat>
struct LinearJob {
  using F = Format<kFormat>;
  using Buffered = Format<WeightFormat::kF32>;
  static constexpr int64_t kBlockBytes = Info(kFormat).panel_bytes;

  const LinearArgs& args;
  int64_t num_groups;  // panel groups of one token chunk

  TS_INLINE void Task(int64_t task) const {
    const int64_t first_panel = task % num_groups * kTilePanels;
    const int64_t num_panels = (args.n + kPanelRows - 1) / kPanelRows;
    const int64_t first_token = task / num_groups * kTaskTokens;
    const int count = static_cast<int>(
        num_panels - first_panel < kTilePanels ? num_panels - first_panel : kTilePanels);
    const int64_t last_token =
        first_token + kTaskTokens < args.num_tokens ? first_token + kTaskTokens : args.num_tokens;
    int64_t ids[kTilePanels];
    const uint8_t* panels[kTilePanels];
    const int64_t panel_bytes = args.k / F::kBlock * kBlockBytes;
    for (int p = 0; p < count; ++p) {
      ids[p] = first_panel + p;
      panels[p] = args.weight + ids[p] * panel_bytes;
    }
    const auto tokens = static_cast<int>(last_token - first_token);
    if (tokens <= kDirectTokens) {
      return RunGroup<F, kDirectTokens, kTilePanels>(count, tokens, args, first_token, ids, panels,
                                                     kBlockBytes, kTilePanels * panel_bytes);
    }
    if (tokens <= kTallTokens) {
      return RunGroup<F, kTallTokens, 1>(count, tokens, args, first_token, ids, panels, kBlockBytes,
                                         panel_bytes);
    }
    if constexpr (kFormat != WeightFormat::kF32)
      Dequantize(count, kTilePanels * panel_bytes, panels);
    for (int64_t token = first_token; token < last_token; token += kTileTokens) {
      const int height =
          static_cast<int>(last_token - token < kTileTokens ? last_token - token : kTileTokens);
      RunGroup<Buffered, kTileTokens, kTilePanels>(count, height, args, token, ids, panels, 64, 0);
    }
  }

  // Replaces the panels' addresses by those of their dequantised copies.
  TS_INLINE void Dequantize(int count, int64_t ahead, const uint8_t** panels) const {
    const int64_t panel_floats = args.k * kLanes;
    auto* const buffer = static_cast<float*>(
        Scratch(ScratchSlot::kWeights, kTilePanels * panel_floats * sizeof(float)));
    for (int p = 0; p < count; ++p) {
      float* const out = buffer + p * panel_floats;
      DequantizePanel<F>(panels[p], args.k, kBlockBytes, ahead, out);
      panels[p] = reinterpret_cast<const uint8_t*>(out);
    }
  }

  static void Run(void* context, int64_t begin, int64_t end) {
    const auto& job = *static_cast<const LinearJob*>(context);
    for (int64_t task = begin; task < end; ++task) job.Task(task);
  }
};

// Work below this many multiply-adds is not worth waking a thread for.
constexpr int64_t kSerialWork = 20000;

template <WeightFormat kFormat>
void LinearOf(const LinearArgs& args) {
  const int64_t num_panels = (args.n + kPanelRows - 1) / kPanelRows;
  const int64_t num_groups = (num_panels + kTilePanels - 1) / kTilePanels;
  const int64_t num_chunks = (args.num_tokens + kTaskTokens - 1) / kTaskTokens;
  const int64_t num_tasks = num_groups * num_chunks;
  LinearJob<kFormat> job{args, num_groups};
  ThreadPool& pool = ThreadPool::Global();
  int64_t grain = num_tasks;
  if (args.num_tokens * args.n * args.k > kSerialWork) {
    grain = num_tasks / (16 * pool.num_threads()) + 1;
  }
  pool.ParallelFor(num_tasks, grain, &LinearJob<kFormat>::Run, &job);
}

// Several products as one job: no thread waits at the end of each.
template <WeightFormat kFormat>
struct GroupedJob {
  const GroupedLinearArgs& args;

  static int64_t NumPanelGroups(const LinearArgs& linear) {
    return ((linear.n + kPanelRows - 1) / kPanelRows + kTilePanels - 1) / kTilePanels;
  }

  static void Run(void* context, int64_t begin, int64_t end) {
    const GroupedLinearArgs& args = static_cast<const GroupedJob*>(context)->args;
    int64_t group = 0;
    while (args.task_ends[group] <= begin) ++group;
    for (int64_t task = begin; task < end; ++task) {
      while (args.task_ends[group] <= task) ++group;
      const LinearArgs& linear = args.groups[group];
      const int64_t first = group == 0 ? 0 : args.task_ends[group - 1];
      LinearJob<kFormat>{linear, NumPanelGroups(linear)}.Task(task - first);
    }
  }
};

template <WeightFormat kFormat>
void GroupedLinearOf(const GroupedLinearArgs& args) {
  int64_t num_tasks = 0, work = 0;
  for (int64_t i = 0; i < args.num_groups; ++i) {
    const LinearArgs& linear = args.groups[i];
    const int64_t num_chunks = (linear.num_tokens + kTaskTokens - 1) / kTaskTokens;
    num_tasks += GroupedJob<kFormat>::NumPanelGroups(linear) * num_chunks;
    work += linear.num_tokens * linear.n * linear.k;
    args.task_ends[i] = num_tasks;
  }
  GroupedJob<kFormat> job{args};
  ThreadPool& pool = ThreadPool::Global();
  const int64_t grain = work > kSerialWork ? num_tasks / (16 * pool.num_threads()) + 1 : num_tasks;
  pool.ParallelFor(num_tasks, grain, &GroupedJob<kFormat>::Run, &job);
}

template <WeightFormat kFormat>
void EmbeddingOf(const EmbeddingArgs& args) {
  using F = Format<kFormat>;
  constexpr int64_t kBlockBytes = Info(kFormat).panel_bytes;
  const int64_t panel_bytes = args.k / F::kBlock * kBlockBytes;
  alignas(64) float block[F::kBlock * kLanes];
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const int64_t id = args.wide_ids ? static_cast<const int64_t*>(args.token_ids)[token]
                                     : static_cast<const int32_t*>(args.token_ids)[token];
    const uint8_t* panel = args.weight + id / kPanelRows * panel_bytes;
    const int64_t row = id % kPanelRows;
    float* out = args.out + token * args.k;
    for (int64_t begin = 0; begin < args.k; begin += F::kBlock, panel += kBlockBytes) {
      DequantizePanel<F>(panel, F::kBlock, kBlockBytes, 0, block);
      for (int i = 0; i < F::kBlock; ++i) *out++ = block[i * kLanes + row];
    }
  }
}

// Calls Function<format> for the format known at run time.
#define TS_DISPATCH_FORMAT(Function, format, args)    \
  switch (format) {                                   \
    case WeightFormat::kF32:                          \
      return Function<WeightFormat::kF32>(args);      \
    case WeightFormat::kBf16:                         \
      return Function<WeightFormat::kBf16>(args);     \
    case WeightFormat::kF16:                          \
      return Function<WeightFormat::kF16>(args);      \
    case WeightFormat::kQ4_0:                         \
      return Function<WeightFormat::kQ4_0>(args);     \
    case WeightFormat::kQ4_1:                         \
      return Function<WeightFormat::kQ4_1>(args);     \
    case WeightFormat::kQ5_0:                         \
      return Function<WeightFormat::kQ5_0>(args);     \
    case WeightFormat::kQ5_1:                         \
      return Function<WeightFormat::kQ5_1>(args);     \
    case WeightFormat::kQ8_0:                         \
      return Function<WeightFormat::kQ8_0>(args);     \
    case WeightFormat::kQ4K:                          \
      return Function<WeightFormat::kQ4K>(args);      \
    case WeightFormat::kQ5K:                          \
      return Function<WeightFormat::kQ5K>(args);      \
    case WeightFormat::kQ6K:                          \
      return Function<WeightFormat::kQ6K>(args);      \
    case WeightFormat::kFp8x32:                       \
      return Function<WeightFormat::kFp8x32>(args);   \
    case WeightFormat::kFp8x128:                      \
      return Function<WeightFormat::kFp8x128>(args);  \
    case WeightFormat::kInt8x32:                      \
      return Function<WeightFormat::kInt8x32>(args);  \
    case WeightFormat::kInt8x128:                     \
      return Function<WeightFormat::kInt8x128>(args); \
    case WeightFormat::kInt4x32:                      \
      return Function<WeightFormat::kInt4x32>(args);  \
    case WeightFormat::kInt4x128:                     \
      return Function<WeightFormat::kInt4x128>(args); \
  }

void Linear(const LinearArgs& args) { TS_DISPATCH_FORMAT(LinearOf, args.format, args) }
void Embedding(const EmbeddingArgs& args) { TS_DISPATCH_FORMAT(EmbeddingOf, args.format, args) }
void GroupedLinear(const GroupedLinearArgs& args) {
  if (args.num_groups == 0) return;
  TS_DISPATCH_FORMAT(GroupedLinearOf, args.groups[0].format, args)
}

}  // namespace
}  // namespace tokenspeed::cpu::TS_CPU_ISA_NAMESPACE

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_LINEAR_H_
