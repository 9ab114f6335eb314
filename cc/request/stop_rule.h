// SPDX-License-Identifier: MIT
//
// When a request ends by itself: a stop token after `min_new_tokens`, or `max_new_tokens`. The stop
// token counts as an output token. Pure values and functions.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tokenspeed {

enum class Finish : uint8_t { kNone = 0, kStop = 1, kLength = 2, kAbort = 3 };

struct StopRule {
  int32_t max_new_tokens;
  int32_t min_new_tokens;
  bool ignore_eos;
  std::vector<int32_t> stop_token_ids;

  // Whether `token`, as output number `num_output` counted from 1, ends the request.
  Finish Judge(int32_t token, int32_t num_output, const std::vector<int32_t>& eos_token_ids) const {
    const bool may_stop = num_output >= min_new_tokens;
    if (may_stop && (Has(stop_token_ids, token) || (!ignore_eos && Has(eos_token_ids, token)))) {
      return Finish::kStop;
    }
    return num_output >= max_new_tokens ? Finish::kLength : Finish::kNone;
  }

 private:
  static bool Has(const std::vector<int32_t>& ids, int32_t token) {
    return std::ranges::find(ids, token) != ids.end();
  }
};

}  // namespace tokenspeed
