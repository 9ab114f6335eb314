// SPDX-License-Identifier: MIT
//
// The jobs of prefill_attention.cu, as prefill_plan.cu writes them once a step: for every KV head,
// which queries of which row meet which of its keys. The longest come first.
//
// A plan is int32: the number of jobs, three unused, then the jobs. The layout is known to
// attention/cuda_plan.py, which allocates it.
#pragma once

namespace tokenspeed {

constexpr int kPrefillKeys = 128;     // of a tile
constexpr int kPrefillQueries = 128;  // of a job, all heads of a KV head together

// One job for each KV head. Key tiles are [tile_begin, tile_end).
struct PrefillJob {
  int row;
  int skipped;  // tokens of the row before the job's first
  int tile_begin;
  int tile_end;
  int piece;   // of the keys that these queries see
  int pieces;  // 1: all of them
  int place;   // of the first piece among all pieces, if there are several
  int tile;    // of queries among those whose keys come in pieces
};

}  // namespace tokenspeed
