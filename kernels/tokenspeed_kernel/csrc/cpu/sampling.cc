// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

namespace tokenspeed::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kGroup = 16;  // values behind one entry of group_max

// A row of values with room for what is collected from it.
struct Row {
  const KernelTable* table;
  const float* values;
  int64_t count;
  float max;
  float* found;  // [count]
  int32_t* ids;  // [count]

  int64_t Collect(float threshold) const {
    return table->collect(values, count, threshold, found, ids);
  }
};

// Memory of one row: a scaled copy, found values, their ids.
float* RowScratch(int64_t count, float** found, int32_t** ids) {
  const int64_t padded = (count + kGroup - 1) / kGroup * kGroup;
  auto* const memory =
      static_cast<float*>(Scratch(ScratchSlot::kSampling, 3 * padded * sizeof(float)));
  *found = memory + padded;
  *ids = reinterpret_cast<int32_t*>(memory + 2 * padded);
  return memory;
}

// Where the first value lies that is no number; `count` when all are numbers. What follows compares
// and sorts, which is undefined with one that is none.
int64_t FirstNan(const float* values, int64_t count) {
  // On integers, which compilers turn into vector code: beyond the bits of infinity is no number.
  int32_t any = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    any |= 0x7f800000 - (bits & 0x7fffffff);
  }
  if (any >= 0) return count;
  return std::find_if(values, values + count, [](float value) { return value != value; }) - values;
}

// Collects at least the k largest values, 0 < k <= count, and few more where k is small: k groups
// of sixteen have a maximum that is not below the k-th largest maximum.
int64_t CollectLargest(const Row& row, int64_t k) {
  const int64_t num_groups = (row.count + kGroup - 1) / kGroup;
  float threshold = -kInf;
  if (k <= num_groups / 2) {
    row.table->group_max(row.values, row.count, row.found);
    std::nth_element(row.found, row.found + (k - 1), row.found + num_groups, std::greater<float>());
    threshold = row.found[k - 1];
  }
  return row.Collect(threshold);
}

// The k-th largest value.
float TopKThreshold(const Row& row, int64_t k) {
  const int64_t size = CollectLargest(row, k);
  std::nth_element(row.found, row.found + (k - 1), row.found + size, std::greater<float>());
  return row.found[k - 1];
}

// Walks the collected values from the largest. Returns whether the probability before some value
// reached `target`; `threshold` is the last value before that.
bool ReachesMass(const Row& row, int64_t size, double target, float* threshold) {
  std::sort(row.found, row.found + size, std::greater<float>());
  double before = 0.0;
  for (int64_t i = 0; i < size;) {
    if (i > 0 && before >= target) return true;
    *threshold = row.found[i];
    const double weight = std::exp(static_cast<double>(row.found[i]) - row.max);
    for (; i < size && row.found[i] == *threshold; ++i) before += weight;
  }
  return before >= target;
}

// The lowest value whose strictly likelier rivals sum to less than top_p of what is >= floor.
float TopPThreshold(const Row& row, float top_p, float floor) {
  double total = 0.0;
  if (floor == -kInf) {
    total = row.table->sum_exp(row.values, row.count, row.max);
  } else {
    const int64_t size = row.Collect(floor);
    for (int64_t i = 0; i < size; ++i) {
      total += std::exp(static_cast<double>(row.found[i]) - row.max);
    }
  }
  // Most of the mass is near the maximum: look there first, then ever further down.
  float threshold = row.max;
  for (float gap = 4.0f;; gap *= 2.0f) {
    const float low = std::max(floor, row.max - gap);
    const bool everything = low == floor || gap > 1e6f;
    const int64_t size = row.Collect(everything ? floor : low);
    if (ReachesMass(row, size, static_cast<double>(top_p) * total, &threshold) || everything) {
      return threshold;
    }
  }
}

// The lowest value with exp(value) >= min_p.
float MinPThreshold(float min_p) {
  if (!(min_p > 0.0f)) return -kInf;
  // A step below the rounded logarithm, then up to the first value that passes.
  auto value = std::nextafter(std::log(min_p), -kInf);
  while (value < 0.0f && std::exp(static_cast<double>(value)) < min_p) {
    value = std::nextafter(value, 0.0f);
  }
  return value;
}

int32_t SampleRow(const KernelTable& table, const SampleArgs& args, int64_t index) {
  const float* const logits = args.logits + index * args.logits_stride;
  if (const int64_t nan = FirstNan(logits, args.vocab); nan < args.vocab) {
    return static_cast<int32_t>(nan);  // as torch's argmax: some token of the vocabulary
  }
  const float temperature = args.temperature[index];
  const auto likeliest = static_cast<int32_t>(table.argmax(logits, args.vocab));
  const float largest = logits[likeliest];
  // Nothing differs from an infinite logit by a number.
  if (!(temperature > 0.0f) || largest == kInf) return likeliest;
  if (largest == -kInf) return 0;
  // Values are relative to the largest, so that no temperature, however small, overflows.
  Row row{.table = &table,
          .values = nullptr,
          .count = args.vocab,
          .max = 0.0f,
          .found = nullptr,
          .ids = nullptr};
  float* const scaled = RowScratch(args.vocab, &row.found, &row.ids);
  row.values = scaled;
  table.scale(logits, args.vocab, largest, temperature, scaled);

  float threshold = -kInf;
  const int64_t top_k = args.top_k[index];
  if (top_k > 0 && top_k < args.vocab) threshold = TopKThreshold(row, top_k);
  if (args.top_p[index] < 1.0f) threshold = TopPThreshold(row, args.top_p[index], threshold);
  return table.best_noisy({.values = scaled,
                           .count = args.vocab,
                           .threshold = std::max(threshold, MinPThreshold(args.min_p[index])),
                           .seed = static_cast<uint64_t>(args.seeds[index]),
                           .position = static_cast<uint64_t>(args.positions[index])});
}

void LogprobRow(const KernelTable& table, const LogprobArgs& args, int64_t index) {
  Row row{.table = &table,
          .values = args.logits + index * args.logits_stride,
          .count = args.vocab,
          .max = 0.0f,
          .found = nullptr,
          .ids = nullptr};
  if (FirstNan(row.values, row.count) < row.count) {
    std::fill_n(args.top_values + index * args.top_n, args.top_n, kNan);
    std::iota(args.top_ids + index * args.top_n, args.top_ids + (index + 1) * args.top_n, 0);
    args.chosen[index] = kNan;
    return;
  }
  RowScratch(args.vocab, &row.found, &row.ids);
  row.max = row.values[table.argmax(row.values, row.count)];
  const double total = table.sum_exp(row.values, row.count, row.max);
  const auto log_total = static_cast<float>(std::log(total));
  const auto logprob = [&](float value) { return value - row.max - log_total; };
  const int64_t token = args.wide_ids ? static_cast<const int64_t*>(args.token_ids)[index]
                                      : static_cast<const int32_t*>(args.token_ids)[index];
  args.chosen[index] = logprob(row.values[token]);
  if (args.top_n == 0) return;

  const int64_t size = CollectLargest(row, args.top_n);
  const auto likelier = [&](int32_t a, int32_t b) {
    return row.values[a] != row.values[b] ? row.values[a] > row.values[b] : a < b;
  };
  std::partial_sort(row.ids, row.ids + args.top_n, row.ids + size, likelier);
  for (int64_t i = 0; i < args.top_n; ++i) {
    args.top_ids[index * args.top_n + i] = row.ids[i];
    args.top_values[index * args.top_n + i] = logprob(row.values[row.ids[i]]);
  }
}

// Barred tokens become -inf; words that allow everything cost one comparison.
void MaskRow(const TokenMaskArgs& args, int64_t index) {
  const int64_t num_words = (args.vocab + 31) / 32;
  const uint32_t* const words = args.mask + index * num_words;
  float* const row = args.logits + args.rows[index] * args.vocab;
  for (int64_t w = 0; w < num_words; ++w) {
    if (words[w] == ~uint32_t{0}) continue;
    const int64_t end = std::min<int64_t>(32, args.vocab - w * 32);
    for (int64_t bit = 0; bit < end; ++bit) {
      if ((words[w] >> bit & 1) == 0) row[w * 32 + bit] = -kInf;
    }
  }
}

template <class Args>
struct RowsJob {
  const KernelTable& table;
  const Args& args;
};

}  // namespace

void TokenMask(const TokenMaskArgs& args) {
  const auto run = [](void* context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) MaskRow(*static_cast<const TokenMaskArgs*>(context), i);
  };
  TokenMaskArgs job = args;
  ThreadPool::Global().ParallelFor(args.count, 1, run, &job);
}

void Sample(const KernelTable& table, const SampleArgs& args) {
  RowsJob<SampleArgs> job{table, args};
  const auto run = [](void* context, int64_t begin, int64_t end) {
    const auto& rows = *static_cast<const RowsJob<SampleArgs>*>(context);
    for (int64_t i = begin; i < end; ++i) rows.args.tokens[i] = SampleRow(rows.table, rows.args, i);
  };
  ThreadPool::Global().ParallelFor(args.num_rows, 1, run, &job);
}

void Logprobs(const KernelTable& table, const LogprobArgs& args) {
  RowsJob<LogprobArgs> job{table, args};
  const auto run = [](void* context, int64_t begin, int64_t end) {
    const auto& rows = *static_cast<const RowsJob<LogprobArgs>*>(context);
    for (int64_t i = begin; i < end; ++i) LogprobRow(rows.table, rows.args, i);
  };
  ThreadPool::Global().ParallelFor(args.num_rows, 1, run, &job);
}

}  // namespace tokenspeed::cpu
