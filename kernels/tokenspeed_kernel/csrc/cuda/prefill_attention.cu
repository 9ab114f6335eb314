// SPDX-License-Identifier: MIT
//
// Causal attention of rows with many queries over paged keys and values, for Hopper, head size 128,
// as prefill_plan.cu planned it.
//
// A block stays on its core and takes one job after the other: the queries of some tokens and of
// all heads of one KV head, 128 together, over keys of one row. One warp copies (prefill_copy.cuh)
// for two warpgroups with 64 queries each. Each of these multiplies its queries with the next keys
// while it takes the softmax of the last and multiplies those with their values (as
// FlashAttention-3, Shah et al. 2024); the last values of a job meet the first keys of the next, so
// that the matrix units never wait for a job to begin or to end. Tiles are visited from the
// diagonal down. Where a job has a piece of its queries' keys, the warp that comes last with its
// queries adds up the pieces, in order. Launched by attention/cuda_paged.py, which makes the tensor
// maps.
#include "kernels/tokenspeed_kernel/csrc/cuda/prefill_copy.cuh"
#include "kernels/tokenspeed_kernel/csrc/cuda/softmax.cuh"

namespace tokenspeed {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline void StartScores(float (&scores)[64], const uint8_t* q, const uint8_t* k) {
  const uint64_t queries = hopper::Operand(q, 16, 1024), keys = hopper::Operand(k, 16, 1024);
  hopper::BeginProducts();
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    const int at = step / 4 * kPanelBytes + step % 4 * 32;
    hopper::MultiplyShared(scores, hopper::Advance(queries, at), hopper::Advance(keys, at),
                           step > 0);
  }
  hopper::CommitProducts();
}

// What `out` holds is dropped unless `add`.
__device__ inline void StartOutput(float (&out)[64], const uint32_t (&weights)[8][4],
                                   const uint8_t* v, bool add) {
  const uint64_t values = hopper::Operand(v, kPanelBytes, 1024);
  hopper::BeginProducts();
#pragma unroll
  for (int step = 0; step < kPrefillKeys / 16; ++step) {
    hopper::MultiplyRegisters(out, weights[step], hopper::Advance(values, step * 2048),
                              add || step > 0);
  }
  hopper::CommitProducts();
}

// Hides keys at or past each query's end.
__device__ inline void Mask(float (&scores)[64], const int (&ends)[2], int first_key) {
  const int column = first_key + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (column + i / 4 * 8 + (i & 1) >= ends[i >> 1 & 1]) scores[i] = -INFINITY;
  }
}

// A thread's first query of a job, of which there are kPrefillQueries; the second is eight on.
__device__ inline int FirstQuery() { return (threadIdx.x / 32 - 4) * 16 + (threadIdx.x & 31) / 4; }

// What a consumer knows of the job whose keys it multiplies.
struct Sight {
  int ends[2];      // keys that the thread's queries see
  int seen_by_all;  // keys that all queries of the warpgroup see
  int tile_end;
  int tiles;

  __device__ inline void Read(const Job& job, const PrefillShape& shape) {
    const int from = job.context + job.skipped + 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ends[half] = min(from + (FirstQuery() + half * 8) / shape.group, job.kv_len);
    }
    seen_by_all = from + (threadIdx.x / 128 - 1) * 64 / shape.group;
    tile_end = job.tile_end;
    tiles = job.tiles;
  }
};

__device__ inline void Weigh(float (&scores)[64], Softmax& state, const Sight& sight, int i,
                             float scale, float (&shrink)[2]) {
  const int first_key = (sight.tile_end - 1 - i) * kPrefillKeys;
  if (first_key + kPrefillKeys > sight.seen_by_all) Mask(scores, sight.ends, first_key);
  Weigh(scores, state, scale, shrink);
}

// Where one of the thread's two queries goes; nullptr if there is none.
__device__ inline __nv_bfloat16* PlaceOf(int half, const Job& job, const PrefillShape& shape,
                                         __nv_bfloat16* out) {
  const int query = FirstQuery() + half * 8;
  const int token = query / shape.group;
  if (token >= shape.tokens_per_tile || job.skipped + token >= job.queries) return nullptr;
  const int64_t place = static_cast<int64_t>(job.start + job.skipped + token) * shape.num_heads +
                        job.kv_head * shape.group + query % shape.group;
  return out + place * kHead + (threadIdx.x & 3) * 2;
}

// Where the sums of a piece are that this thread adds up, kConsumers apart, and what of its
// queries.
struct PiecePlace {
  float* sums;
  float2* stats;
};

__device__ inline PiecePlace FindPiece(int piece, const Job& job, const PrefillCall& call,
                                       const PrefillShape& shape) {
  const int64_t place = static_cast<int64_t>(job.place + piece) * shape.num_kv_heads + job.kv_head;
  return {call.partial + place * 64 * kConsumers + threadIdx.x - 128,
          call.stats + place * kPrefillQueries + FirstQuery()};
}

// All pieces of the thread's queries, in their order.
__device__ inline void AddPieces(const Job& job, const PrefillCall& call,
                                 const PrefillShape& shape) {
  float peak[2] = {-INFINITY, -INFINITY};
  for (int piece = 0; piece < job.pieces; ++piece) {
    const float2* stats = FindPiece(piece, job, call, shape).stats;
#pragma unroll
    for (int half = 0; half < 2; ++half) peak[half] = fmaxf(peak[half], __ldcg(stats + half * 8).x);
  }
#pragma unroll 1
  for (int first = 0; first < 64; first += 16) {  // registers are few: 32 columns at a time
    float sum[16] = {}, total[2] = {};
    for (int piece = 0; piece < job.pieces; ++piece) {
      const PiecePlace from = FindPiece(piece, job, call, shape);
      float share[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 stats = __ldcg(from.stats + half * 8);
        share[half] = stats.y > 0.0f ? FastExp2(stats.x - peak[half]) : 0.0f;
        total[half] += stats.y * share[half];
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        sum[i] += share[i >> 1 & 1] * __ldcg(from.sums + (first + i) * kConsumers);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __nv_bfloat16* to = PlaceOf(half, job, shape, call.out);
      if (to == nullptr) continue;
      const float share = 1.0f / total[half];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<__nv_bfloat162*>(to + first * 2 + i * 8) =
            __floats2bfloat162_rn(sum[i * 4 + half * 2] * share, sum[i * 4 + half * 2 + 1] * share);
      }
    }
  }
}

// Leaves a piece's sums; the warp that comes last with its queries adds up all pieces.
__device__ inline void StorePiece(const float (&out)[64], const Softmax& state,
                                  const float (&totals)[2], const Job& job, const PrefillCall& call,
                                  const PrefillShape& shape) {
  const PiecePlace to = FindPiece(job.piece, job, call, shape);
#pragma unroll
  for (int i = 0; i < 64; ++i) to.sums[i * kConsumers] = out[i];
  if ((threadIdx.x & 3) == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to.stats[half * 8] = make_float2(state.peak[half] * shape.scale, totals[half]);
    }
  }
  __threadfence();
  __syncwarp();  // a warp's queries are the same warp's in every piece
  int last = 0;
  if ((threadIdx.x & 31) == 0) {
    int* counter = &call.counters[(job.tile * shape.num_kv_heads + job.kv_head) * kConsumerWarps +
                                  threadIdx.x / 32 - 4];
    last = atomicAdd(counter, 1) == job.pieces - 1;
    if (last) *counter = 0;
  }
  if (!__shfl_sync(0xffffffffu, last, 0)) return;
  __threadfence();
  AddPieces(job, call, shape);
}

__device__ inline void StoreOutput(const float (&out)[64], const Softmax& state, const Job& job,
                                   const PrefillCall& call, const PrefillShape& shape) {
  const float totals[2] = {WholeTotal(state.total[0]), WholeTotal(state.total[1])};
  if (job.pieces > 1) return StorePiece(out, state, totals, job, call, shape);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __nv_bfloat16* to = PlaceOf(half, job, shape, call.out);
    if (to == nullptr) continue;
    const float share = 1.0f / totals[half];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      *reinterpret_cast<__nv_bfloat162*>(to + i * 8) =
          __floats2bfloat162_rn(out[i * 4 + half * 2] * share, out[i * 4 + half * 2 + 1] * share);
    }
  }
}

// Holds what `value` is made of before this place.
__device__ inline void KeepBefore(float value, float* place) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(hopper::SharedAddress(place)), "f"(value)
               : "memory");
}

__device__ inline void TakeTurn(int group) {
  if (group == 0) {
    hopper::Sync<kTurn, kConsumers>();
  } else {
    hopper::Sync<kTurn + 1, kConsumers>();
  }
}

__device__ inline void GiveTurn(int group) {
  if (group == 0) {
    hopper::Signal<kTurn + 1, kConsumers>();
  } else {
    hopper::Signal<kTurn, kConsumers>();
  }
}

__device__ inline void Consume(const PrefillCall& call, const PrefillShape& shape,
                               PrefillShared& s) {
  const int group = threadIdx.x / 128 - 1;
  const int lane = threadIdx.x & 31;
  const int mine = group * 64 * 128;  // bytes of q before the warpgroup's
  Progress at;
  hopper::Wait(&s.q_full[0], 0);
  Sight sight;
  sight.Read(s.jobs[0], shape);
  if (sight.tiles == 0) return;

  float scores[64], out[64], shrink[2];
  uint32_t weights[8][4];
  Softmax state;
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] = 0.0f;
  hopper::Wait(&s.k_full[0], 0);
  StartScores(scores, s.q[0] + mine, s.k[0]);
  hopper::WaitProducts<0>();
  hopper::Pin(scores);
  if (lane == 0) hopper::Arrive(&s.k_empty[0]);
  Weigh(scores, state, sight, 0, shape.scale, shrink);
  Round(scores, weights);

  // The warpgroups take turns at starting products: one's softmax runs while the other multiplies.
  if (group == 1) hopper::Signal<kTurn, kConsumers>();
  int i = 0;         // the tile of the job whose values are next
  bool add = false;  // to what there is of the job
  for (;; ++at.tile) {
    const bool ends = i == sight.tiles - 1;
    if (ends) {
      if (lane == 0) hopper::Arrive(&s.q_empty[at.Slot()]);
      ++at.job;
      hopper::Wait(&s.q_full[at.Slot()], at.JobPhase());
      sight.Read(s.jobs[at.job % kJobs], shape);
      if (sight.tiles == 0) break;
      i = -1;
    }
    ++i;
    Progress next = at;
    ++next.tile;
    hopper::Wait(&s.k_full[next.Stage()], next.Phase());
    TakeTurn(group);
    StartScores(scores, s.q[at.Slot()] + mine, s.k[next.Stage()]);
    Shrink(out, shrink);
    hopper::Wait(&s.v_full[at.Stage()], at.Phase());
    StartOutput(out, weights, s.v[at.Stage()], add);
    GiveTurn(group);
    hopper::WaitProducts<1>();
    hopper::Pin(scores);
    if (lane == 0) hopper::Arrive(&s.k_empty[next.Stage()]);
    const Softmax finished = state;
    if (ends) state = Softmax();
    Weigh(scores, state, sight, i, shape.scale, shrink);
    // The compiler waits before it computes, unless something that it may not move is between.
    KeepBefore(state.total[0] + state.total[1], &s.kept[threadIdx.x - 128]);
    hopper::WaitProducts<0>();
    hopper::Pin(out);
    if (lane == 0) hopper::Arrive(&s.v_empty[at.Stage()]);
    if (ends) StoreOutput(out, finished, s.jobs[(at.job - 1) % kJobs], call, shape);
    add = !ends;
    Round(scores, weights);
  }
  Shrink(out, shrink);
  hopper::Wait(&s.v_full[at.Stage()], at.Phase());
  StartOutput(out, weights, s.v[at.Stage()], add);
  hopper::WaitProducts<0>();
  hopper::Pin(out);
  StoreOutput(out, state, s.jobs[(at.job - 1) % kJobs], call, shape);
}

#endif  // sm_90a

}  // namespace tokenspeed

extern "C" __global__ void __launch_bounds__(384, 1)
    prefill_attention_bf16(const __grid_constant__ CUtensorMap q_map,
                           const __grid_constant__ CUtensorMap k_map,
                           const __grid_constant__ CUtensorMap v_map, const int* plan,
                           const int* tables, const int* query_start, const int* kv_lens,
                           __nv_bfloat16* out, float* partial, float2* stats, int* counters,
                           int* queue, const tokenspeed::PrefillShape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace tokenspeed;
  extern __shared__ uint8_t memory[];
  auto& s =
      *reinterpret_cast<PrefillShared*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  const PrefillCall call = {plan,    tables, query_start, kv_lens, out,
                            partial, stats,  counters,    queue};
  LaunchDependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQuerySlots; ++i) {
      hopper::InitBarrier(&s.q_full[i], 1);
      hopper::InitBarrier(&s.q_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      hopper::InitBarrier(&s.k_full[i], 1);
      hopper::InitBarrier(&s.v_full[i], 1);
      hopper::InitBarrier(&s.k_empty[i], kConsumerWarps);
      hopper::InitBarrier(&s.v_empty[i], kConsumerWarps);
    }
    hopper::InitBarrier(&s.tail, 1);
    hopper::FenceShared();
  }
  __syncthreads();
  WaitForPrevious();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<40>();
    if (threadIdx.x < 32) Produce(&q_map, &k_map, &v_map, call, shape, s);
  } else {
    hopper::TakeRegisters<232>();
    Consume(call, shape, s);
  }
#endif
}
