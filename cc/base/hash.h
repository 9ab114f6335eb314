// SPDX-License-Identifier: MIT
//
// The chained block hash: hash(block i) depends on every token before it and on the identity
// (weight version, cache salt, adapter) at the root. It is a finder and a public name (KV events
// carry it), never a proof: the prefix index compares tokens, so that a collision costs a hit and
// not correctness. Stable over processes and machines: fixed constants, no seed, little-endian
// arithmetic on integers.

#pragma once

#include <cstdint>
#include <span>

namespace tokenspeed {

constexpr uint64_t MixBits(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

constexpr uint64_t HashCombine(uint64_t seed, uint64_t value) {
  return MixBits(seed + 0x9e3779b97f4a7c15ULL + MixBits(value));
}

// Hash of one block of tokens after the chain `parent`. Two multiply lanes hide the latency of the
// chain.
constexpr uint64_t HashTokens(uint64_t parent, std::span<const int32_t> tokens) {
  constexpr uint64_t kLaneA = 0x9e3779b97f4a7c15ULL;
  constexpr uint64_t kLaneB = 0xc2b2ae3d27d4eb4fULL;
  uint64_t a = parent ^ kLaneB;
  uint64_t b = parent + kLaneA;
  size_t i = 0;
  for (; i + 1 < tokens.size(); i += 2) {
    a = (a ^ static_cast<uint32_t>(tokens[i])) * kLaneA;
    a ^= a >> 29;
    b = (b ^ static_cast<uint32_t>(tokens[i + 1])) * kLaneB;
    b ^= b >> 31;
  }
  if (i < tokens.size()) a = (a ^ static_cast<uint32_t>(tokens[i])) * kLaneA + 1;
  return HashCombine(HashCombine(a, b), tokens.size());
}

}  // namespace tokenspeed
