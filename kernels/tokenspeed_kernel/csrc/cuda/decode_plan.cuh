// SPDX-License-Identifier: MIT
//
// What the blocks of decode_attention.cu do, as decode_plan.cu writes it once a step: which keys of
// which rows each of them reads, and how many parts each row's sums come in.
//
// A plan is int32: the number of items, three unused, then five numbers for each row by kind, then
// the items. The layout is known to attention/cuda_plan.py, which allocates it.
#pragma once

#include <stdint.h>

namespace tokenspeed {

constexpr int kKeyTile = 64;  // items begin at multiples of it

struct DecodePlan {
  __device__ DecodePlan(int* plan, int num_rows)
      : count(plan),
        base(plan + 4),
        parts(base + num_rows),
        members(parts + num_rows),
        leader(members + num_rows),
        common(leader + num_rows),
        items(reinterpret_cast<int4*>(plan + (4 + 5 * num_rows + 3) / 4 * 4)) {}

  int* count;
  int* base;     // of a row's parts among all
  int* parts;    // of a row
  int* members;  // rows whose prefix is shared, group by group
  int* leader;   // the first row with the same first block
  int* common;   // tokens that a row has in common with its leader
  int4* items;   // see below
};

// A row's own keys: x is the row. Keys of a group: x is -1 - the first member's place, and `w`
// holds the number of members above the part. Keys are [y, z).
__device__ inline int4 OwnItem(int row, int begin, int end, int part) {
  return make_int4(row, begin, end, part);
}
__device__ inline int4 SharedItem(int first, int begin, int end, int part, int members) {
  return make_int4(-1 - first, begin, end, part | members << 8);
}

}  // namespace tokenspeed
