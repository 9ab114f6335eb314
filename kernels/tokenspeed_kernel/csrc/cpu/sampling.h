// SPDX-License-Identifier: MIT
//
// Sampling and log-probabilities of whole batches: one row a thread, each row from the passes of
// the kernel table. top-k, top-p and min-p keep a token by its value alone, so each is a threshold;
// no row is ever sorted whole. The definition is sampling/reference.py.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_SAMPLING_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_SAMPLING_H_

#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"

namespace tokenspeed::cpu {

struct TokenMaskArgs {
  float* logits;  // [.., vocab]
  int64_t vocab;
  const uint32_t* mask;  // [count, ceil(vocab / 32)], a set bit allows
  const int64_t* rows;   // [count] distinct rows of logits
  int64_t count;
};

void TokenMask(const TokenMaskArgs& args);
void Sample(const KernelTable& table, const SampleArgs& args);
void Logprobs(const KernelTable& table, const LogprobArgs& args);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_SAMPLING_H_
