// SPDX-License-Identifier: MIT
//
// What, beside its tokens, decides the content of a KV block. Two requests share blocks only when
// their identities are equal; the index compares them exactly. `image hashes` enter as tokens: the
// engine replaces placeholder tokens by ids derived from the image. Pure value.

#pragma once

#include <compare>
#include <cstdint>

#include "cc/base/hash.h"

namespace tokenspeed {

struct Identity {
  int64_t weight_version;
  int64_t cache_salt;
  int64_t adapter;

  friend auto operator<=>(const Identity&, const Identity&) = default;
  uint64_t RootHash() const {
    const uint64_t version =
        HashCombine(0x746f6b656e737064ULL, static_cast<uint64_t>(weight_version));
    return HashCombine(HashCombine(version, static_cast<uint64_t>(cache_salt)),
                       static_cast<uint64_t>(adapter));
  }
};

}  // namespace tokenspeed
