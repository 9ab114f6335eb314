// SPDX-License-Identifier: MIT
//
// How the blocks of latent_decode.cu share the keys of all rows, as latent_plan.cu works it out
// once a step. Rows' keys, in tiles, make one line; block b begins at tile b * share of it.
//
// A plan is int32: the share, the number of tiles, two unused, the row where each block begins, and
// the tiles before each row, with one more at the end. The layout is known to
// attention/cuda_plan.py, which allocates it.
#pragma once

namespace tokenspeed {

constexpr int kLatentTile = 64;  // keys

template <typename Int>
struct LatentPlanOf {
  __device__ LatentPlanOf(Int* memory, int num_blocks)
      : head(memory), first_row(memory + 4), before(first_row + num_blocks) {}

  Int* head;
  Int* first_row;
  Int* before;
};

using LatentPlan = LatentPlanOf<const int>;

}  // namespace tokenspeed
