// SPDX-License-Identifier: MIT
//
// A mixture of experts on the CPU: tokens are sorted by expert, and the networks of all experts
// that were chosen run as two grouped products. Only chosen experts' weights are read. Which tokens
// share an expert decides who works, never what is computed. Called without the GIL; memory is the
// caller's, bookkeeping is scratch of the calling thread.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_MOE_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_MOE_H_

#include <cstdint>

#include "kernels/tokenspeed_kernel/csrc/cpu/kernels.h"

namespace tokenspeed::cpu {

// One matrix [num_rows, num_columns] of every expert, packed as in weight_format.h.
struct ExpertMatrix {
  const uint8_t* data;  // experts lie `expert_bytes` apart
  WeightFormat format;
  int64_t expert_bytes, num_rows, num_columns;
};

struct ExpertsArgs {
  const float* x;  // [num_tokens, hidden], hidden = gate.num_columns
  int64_t x_stride;
  const float* weights;   // [num_tokens, top_k]
  const int32_t* chosen;  // [num_tokens, top_k]
  int64_t num_tokens, top_k, num_experts;
  // The rows of gate_up[0] lie above those of gate_up[1], where there is one.
  ExpertMatrix gate_up[2];
  int64_t num_parts;
  ExpertMatrix down;
  const float* gate_up_bias;  // [num_experts, 2 * down.num_columns] or null
  const float* down_bias;     // [num_experts, down.num_rows] or null
  bool clamped;
  float alpha, limit;
  // Room for num_tokens * top_k rows of 2 * inner and of max(hidden, down.num_rows) floats.
  float* gate_up_rows;
  float* hidden_rows;
  float* out;  // [num_tokens, down.num_rows]
};

void RunExperts(const KernelTable& table, const ExpertsArgs& args);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_MOE_H_
