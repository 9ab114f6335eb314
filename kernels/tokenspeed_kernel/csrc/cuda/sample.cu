// SPDX-License-Identifier: MIT
//
// From a row of logits to its token, one block a row: temperature, top-k, top-p, min-p, Gumbel-max.
//
// Greedy rows take one pass. A filtered row takes two where few tokens can be kept: the first finds
// the largest of 2,048 strided parts of the row, of which the k-th largest bounds the k-th largest
// token; the second collects what lies above and that is sorted and summed in float64. Where that
// does not settle it (a flat row, a large k), the threshold is found by histograms, a pass each, of
// counts or of weights in units of 2^-44. Rows without filters take two passes. Nothing depends on
// the order in which threads run. Launched by sampling/cuda_sample.py.
#include "kernels/tokenspeed_kernel/csrc/cuda/sample_row.cuh"

namespace tokenspeed {

struct Filters {
  int top_k;
  float top_p;
  float min_p;
  uint64_t seed;
  uint64_t position;
};

constexpr int kMostSorted = 1024;  // of top_k, for which candidates are collected
constexpr int kUsualNucleus = 512;
constexpr double kWeightUnit = 0x1p44;
constexpr double kFastError = 1e-5;  // relative, of the fast total

// The row's largest logit and its lowest token; leaves the largest of each part in s.items.
__device__ inline uint64_t FindPeak(const Row& row, Shared& s) {
  float most[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
  int at[4] = {};
  const auto take = [](float value, int group, float& best, int& where) {
    if (value > best) {
      best = value;
      where = group;
    }
  };
  ForEachFour(row, [&](int group, const float4& v) {
    take(v.x, group, most[0], at[0]);
    take(v.y, group, most[1], at[1]);
    take(v.z, group, most[2], at[2]);
    take(v.w, group, most[3], at[3]);
  });
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t token = most[i] == -kInfinity ? 0 : at[i] * 4 + i;
    const uint64_t scored = Scored(most[i], token);
    best = scored > best ? scored : best;
    s.items[threadIdx.x * 4 + i] = static_cast<uint32_t>(~Ordered(most[i]));
  }
  return BlockMax(best, s);
}

// Collects every token not below the wanted-th largest part; s.count says how many there are, even
// if they are more than fit. Returns the sum of all weights, nearly, if asked for.
__device__ inline double Collect(const Row& row, int wanted, bool weigh, Shared& s) {
  Sort(s, kItems);
  const float bound = FromOrdered(~static_cast<uint32_t>(s.items[wanted - 1]));
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  const float farthest = row.Far(bound);
  // Tokens just below may lie as far once rounded, so they are looked at too.
  const float low = bound - (1e-6f * (row.peak - bound) + 2.4e-7f * fabsf(bound));
  const float speed = fmaxf(-1.4426950408889634f / row.temperature, -3e38f);  // 0 times it is 0
  double total = 0.0;
  const auto look = [&](float value, int token) {
    if (value >= low || bound == -kInfinity) {
      const float far = row.Far(value);
      if (far <= farthest && far < kInfinity) {
        const int place = atomicAdd(&s.count, 1);
        if (place < kItems) {
          s.items[place] = static_cast<uint64_t>(__float_as_uint(far)) << 32 | token;
        }
      }
    }
  };
  ForEachFour(row, [&](int group, const float4& v) {
    if (weigh) {
      const float four = exp2f((row.peak - v.x) * speed) + exp2f((row.peak - v.y) * speed) +
                         exp2f((row.peak - v.z) * speed) + exp2f((row.peak - v.w) * speed);
      total += four;
    }
    look(v.x, group * 4);
    look(v.y, group * 4 + 1);
    look(v.z, group * 4 + 2);
    look(v.w, group * 4 + 3);
  });
  double all = 0.0;
  BlockScan(total, &all, s);
  return all;
}

__device__ inline double ExactTotal(const Row& row, Shared& s) {
  double total = 0.0, all;
  ForEachFour(row, [&](int, const float4& v) {
    total += exp(-static_cast<double>(row.Far(v.x))) + exp(-static_cast<double>(row.Far(v.y))) +
             exp(-static_cast<double>(row.Far(v.z))) + exp(-static_cast<double>(row.Far(v.w)));
  });
  BlockScan(total, &all, s);
  return all;
}

__device__ inline uint32_t FarOf(uint64_t item) { return static_cast<uint32_t>(item >> 32); }

// The first of the sorted items, up to `count`, that begins a new value and has at least `target`
// before it; `count` if there is none. `before`: of the thread's own items.
__device__ inline int FirstReached(const double (&before)[kEach], int count, double target,
                                   Shared& s) {
  int first = count;
#pragma unroll
  for (int i = kEach - 1; i >= 0; --i) {
    const int at = threadIdx.x * kEach + i;
    if (at > 0 && at < count && before[i] >= target &&
        FarOf(s.items[at]) != FarOf(s.items[at - 1])) {
      first = at;
    }
  }
  return kItems - static_cast<int>(BlockMax(kItems - first, s));
}

// How many of the sorted candidates the filters keep; -1 where candidates do not settle it.
__device__ inline int Keep(const Row& row, const Filters& f, bool by_count, double fast_total,
                           Shared& s) {
  int kept = s.count;
  if (by_count && kept > f.top_k) {
    const uint32_t last = FarOf(s.items[f.top_k - 1]);
    int beyond = kept;
    for (int at = threadIdx.x; at < kept; at += kThreads) {
      if (FarOf(s.items[at]) > last) beyond = min(beyond, at);
    }
    kept = kItems - static_cast<int>(BlockMax(kItems - beyond, s));
  }
  if (!(f.top_p < 1.0f)) return kept;
  double before[kEach], mine = 0.0, total;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = threadIdx.x * kEach + i;
    before[i] = mine;
    if (at < kept) mine += exp(-static_cast<double>(__uint_as_float(FarOf(s.items[at]))));
  }
  const double threads_before = BlockScan(mine, &total, s);
#pragma unroll
  for (int i = 0; i < kEach; ++i) before[i] += threads_before;
  const double share = f.top_p;
  if (by_count) return FirstReached(before, kept, share * total, s);
  double target = share * fast_total * (1.0 + kFastError);
  int first = FirstReached(before, kept, target, s);
  if (first != FirstReached(before, kept, share * fast_total * (1.0 - kFastError), s) ||
      (first == kept && total < target)) {
    target = share * ExactTotal(row, s);
    first = FirstReached(before, kept, target, s);
    if (first == kept && total < target) return -1;
  }
  return first;
}

// The smallest order key up to which, among keys up to `limit`, there are `goal` tokens, or, with
// WEIGHED, the share `goal` of their weight.
template <bool WEIGHED>
__device__ inline uint32_t FindLimit(const Row& row, double goal, uint32_t limit, Shared& s) {
  uint32_t low = 0, high = limit;
  uint64_t below = 0, wanted = WEIGHED ? 0 : static_cast<uint64_t>(goal);
  for (bool first = true;; first = false) {
    const uint32_t width = high - low;
    const int shift = width < kItems ? 0 : 21 - __clz(width);
    for (int i = threadIdx.x; i < kItems; i += kThreads) {
      s.items[i] = 0;
      s.counts[i] = 0;
    }
    __syncthreads();
    const auto add = [&](float value) {
      const float far = row.Far(value);
      const uint32_t key = __float_as_uint(far);
      if (key < low || key > high) return;
      // At first by value, 64 bins to a unit: a product by 64 is exact, so bins have exact bounds.
      const uint32_t bin =
          first ? min(static_cast<uint32_t>(far * 64.0f), kItems - 1u) : (key - low) >> shift;
      atomicAdd(&s.counts[bin], 1u);
      if (WEIGHED) {
        const double weight = exp(-static_cast<double>(far)) * kWeightUnit;
        atomicAdd(reinterpret_cast<unsigned long long*>(&s.items[bin]), __double2ull_rn(weight));
      }
    };
    ForEachFour(row, [&](int, const float4& v) {
      add(v.x);
      add(v.y);
      add(v.z);
      add(v.w);
    });
    __syncthreads();
    uint64_t amount[kEach], mine = 0, total;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int bin = threadIdx.x * kEach + i;
      amount[i] = WEIGHED ? s.items[bin] : s.counts[bin];
      mine += amount[i];
    }
    uint64_t through = below + BlockScan(mine, &total, s);
    if (WEIGHED && first) wanted = static_cast<uint64_t>(ceil(goal * static_cast<double>(total)));
    if (below + total < wanted) return limit;  // fewer tokens than wanted: all stay
    // Exactly one bin, the first to reach what is wanted, has less before it.
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint64_t before = through;
      through += amount[i];
      const bool begins = threadIdx.x == 0 && i == 0;
      if (through >= wanted && (before < wanted || begins)) {
        s.where = threadIdx.x * kEach + i;
        s.found = before;
      }
    }
    __syncthreads();
    const uint32_t bin = s.where;
    below = s.found;
    const bool alone = s.counts[bin] <= 1;
    __syncthreads();
    const uint32_t top = high;
    if (first) {
      low = __float_as_uint(bin * 0.015625f);
      high = bin == kItems - 1 ? top : min(top, __float_as_uint((bin + 1) * 0.015625f) - 1);
    } else {
      low += bin << shift;
      high = min(top, low + (1u << shift) - 1);
    }
    if (low == high || alone) return high;
  }
}

// The farthest that a token at least min_p times as likely as the likeliest can be.
__device__ inline uint32_t MinPLimit(float min_p) {
  if (!(min_p > 0.0f)) return kFarthest;
  uint32_t key = __float_as_uint(fmaxf(-logf(min_p) * 1.000001f + 1e-6f, 0.0f));
  while (key > 0 && exp(-static_cast<double>(__uint_as_float(key))) < min_p) --key;
  return key;
}

// The best of all tokens up to `limit`, as Scored.
__device__ inline uint64_t BestNoisy(const Row& row, const Filters& f, uint32_t limit, Shared& s) {
  constexpr float kMostNoise = 16.64f;
  if (threadIdx.x == 0) s.best = -kInfinity;
  __syncthreads();
  uint64_t best = 0;
  ForEachFour(row, [&](int group, const float4& v) {
    // Any score that some thread has seen is a bound, so it may be read and written without order.
    const float bound = *static_cast<volatile float*>(&s.best);
    const float far[4] = {row.Far(v.x), row.Far(v.y), row.Far(v.z), row.Far(v.w)};
    const float nearest = fminf(fminf(far[0], far[1]), fminf(far[2], far[3]));
    if (__float_as_uint(nearest) > limit || kMostNoise - nearest < bound) return;
    uint32_t words[4];
    Philox(f.seed, f.position, group, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float u = Uniform(words[i]);
      if (__float_as_uint(far[i]) <= limit && GumbelBound(u) - far[i] >= bound) {
        const float score = Gumbel(u) - far[i];
        const uint64_t scored = Scored(score, group * 4 + i);
        if (scored > best) best = scored;
        if (score > bound) *static_cast<volatile float*>(&s.best) = score;
      }
    }
  });
  return BlockMax(best, s);
}

__device__ inline uint64_t BestOfSorted(const Filters& f, int kept, Shared& s) {
  uint64_t best = 0;
  for (int at = threadIdx.x; at < kept; at += kThreads) {
    const float far = __uint_as_float(FarOf(s.items[at]));
    if (at > 0 && exp(-static_cast<double>(far)) < f.min_p) continue;
    const uint32_t token = static_cast<uint32_t>(s.items[at]);
    uint32_t words[4];
    Philox(f.seed, f.position, token / 4, words);
    const uint32_t pair =
        token & 2 ? (token & 1 ? words[3] : words[2]) : (token & 1 ? words[1] : words[0]);
    const uint64_t scored = Scored(Gumbel(Uniform(pair)) - far, token);
    best = scored > best ? scored : best;
  }
  return BlockMax(best, s);
}

__device__ inline uint64_t Draw(const Row& row, const Filters& f, Shared& s) {
  const bool by_count = f.top_k > 0 && f.top_k < row.vocab;
  const bool by_weight = f.top_p < 1.0f;
  uint32_t limit = kFarthest;
  if (by_count || by_weight) {
    if (!by_count || f.top_k <= kMostSorted) {
      const int wanted = by_count ? f.top_k : kUsualNucleus;
      const double total = Collect(row, wanted, by_weight && !by_count, s);
      const int count = s.count;
      if (count <= kItems) {
        int size = 2;
        while (size < count) size <<= 1;
        for (int at = count + threadIdx.x; at < size; at += kThreads) s.items[at] = ~0ull;
        __syncthreads();
        Sort(s, size);
        const int kept = Keep(row, f, by_count, total, s);
        if (kept >= 0) return BestOfSorted(f, kept, s);
      }
    }
    if (by_count) limit = FindLimit<false>(row, f.top_k, limit, s);
    if (by_weight) limit = FindLimit<true>(row, f.top_p, limit, s);
  }
  return BestNoisy(row, f, min(limit, MinPLimit(f.min_p)), s);
}

}  // namespace tokenspeed

extern "C" __global__ void __launch_bounds__(tokenspeed::kThreads, 2)
    sample_rows(const float* logits, const float* temperatures, const int* top_ks,
                const float* top_ps, const float* min_ps, const int64_t* seeds,
                const int64_t* positions, int* tokens, int64_t stride, int vocab) {
  using namespace tokenspeed;
  __shared__ Shared shared;
  LaunchDependents();
  WaitForPrevious();
  const int64_t index = blockIdx.x;
  Row row = {logits + index * stride, vocab, 0.0f, temperatures[index]};
  uint64_t best = FindPeak(row, shared);
  row.peak = FromOrdered(static_cast<uint32_t>(best >> 32));
  if (row.temperature > 0.0f && row.peak > -kInfinity) {
    const Filters filters = {top_ks[index], top_ps[index], min_ps[index],
                             static_cast<uint64_t>(seeds[index]),
                             static_cast<uint64_t>(positions[index])};
    best = Draw(row, filters, shared);
  }
  if (threadIdx.x == 0) tokens[index] = static_cast<int>(~static_cast<uint32_t>(best));
}
