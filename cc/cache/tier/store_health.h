// SPDX-License-Identifier: MIT
//
// Whether it is worth asking the store. After a failure it is left alone for a while that doubles
// with each further one, then one operation at a time finds out whether it is back. The clock is
// the caller's: a time comes in with each event. Pure values.

#pragma once

#include <algorithm>
#include <cstdint>

namespace tokenspeed {

class StoreHealth {
 public:
  StoreHealth(int64_t backoff_us, int64_t max_backoff_us)
      : backoff_us_(backoff_us), max_backoff_us_(max_backoff_us) {}

  bool MayAsk(int64_t now_us, int32_t num_in_flight) const {
    return wait_us_ == 0 || (now_us >= retry_at_us_ && num_in_flight == 0);
  }
  void Succeeded() { wait_us_ = 0; }
  // Operations that were in flight together fail together: that is one failure.
  void Failed(int64_t now_us) {
    if (wait_us_ > 0 && now_us < retry_at_us_) return;
    wait_us_ = wait_us_ == 0 ? backoff_us_ : std::min(2 * wait_us_, max_backoff_us_);
    retry_at_us_ = now_us + wait_us_;
  }

 private:
  int64_t backoff_us_;
  int64_t max_backoff_us_;
  int64_t wait_us_ = 0;  // 0: it is well
  int64_t retry_at_us_ = 0;
};

}  // namespace tokenspeed
