// SPDX-License-Identifier: MIT
//
// The tokens of one request, prompt then output, and the chained hashes of its full blocks. A hash
// is computed once, the first time somebody needs it after its tokens are known; only a new
// identity (the weights changed while the request waited) starts the chain again. A queued request
// holds no hash. Owned by its `Request`; scheduler's thread only.

#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cc/base/hash.h"

namespace tokenspeed {

class TokenLog {
 public:
  explicit TokenLog(std::vector<int32_t> prompt)
      : tokens_(std::move(prompt)), num_prompt_(static_cast<int32_t>(tokens_.size())) {}

  void Append(int32_t token) { tokens_.push_back(token); }

  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t num_prompt() const { return num_prompt_; }
  int32_t num_output() const { return size() - num_prompt_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  std::span<const int32_t> tokens(int32_t start, int32_t count) const {
    return tokens().subspan(static_cast<size_t>(start), static_cast<size_t>(count));
  }

  // The hashes of all full blocks, extended over tokens appended since the last call.
  std::span<const uint64_t> Hashes(uint64_t root, int32_t block_size) {
    if (root != root_) {
      root_ = root;
      hashes_.clear();
    }
    const auto stride = static_cast<size_t>(block_size);
    for (size_t i = hashes_.size(); (i + 1) * stride <= tokens_.size(); ++i) {
      hashes_.push_back(
          HashTokens(i == 0 ? root : hashes_.back(), tokens().subspan(i * stride, stride)));
    }
    return hashes_;
  }

 private:
  std::vector<int32_t> tokens_;
  int32_t num_prompt_;
  uint64_t root_ = 0;
  std::vector<uint64_t> hashes_;
};

}  // namespace tokenspeed
