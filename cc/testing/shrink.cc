// SPDX-License-Identifier: MIT

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "cc/testing/random_driver.h"

namespace tokenspeed::testing {
namespace {

// What went wrong, without the numbers that change on the way.
std::string KindOf(const std::string& failure) { return failure.substr(0, failure.find(':')); }

class Shrinker {
 public:
  Shrinker(Scenario scenario, Fault fault)
      : best_(std::move(scenario)), fault_(fault), failure_(Replay(best_, fault).failure) {}

  Scenario Run() {
    if (!failure_) return best_;
    for (bool smaller = true; smaller;) {
      smaller = RemoveMoves();
      smaller |= LowerBytes();
    }
    return best_;
  }

 private:
  bool Try(const Scenario& candidate) {
    const Report report = Replay(candidate, fault_);
    if (!report.failure || !failure_ || KindOf(*report.failure) != KindOf(*failure_)) return false;
    best_ = candidate;
    return true;
  }

  bool RemoveMoves() {
    bool any = false;
    for (size_t chunk = std::max<size_t>(1, best_.moves.size() / 2); chunk > 0; chunk /= 2) {
      for (size_t at = 0; at < best_.moves.size();) {
        Scenario smaller = best_;
        const auto begin = smaller.moves.begin() + static_cast<std::ptrdiff_t>(at);
        const auto count = std::min(chunk, smaller.moves.size() - at);
        smaller.moves.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
        if (Try(smaller)) {
          any = true;
        } else {
          at += chunk;
        }
      }
    }
    return any;
  }

  bool Lower(uint8_t& (*byte_of)(Scenario&, size_t), size_t at) {
    bool any = false;
    for (uint8_t value = byte_of(best_, at); value > 0; value /= 2) {
      Scenario smaller = best_;
      byte_of(smaller, at) = static_cast<uint8_t>(byte_of(best_, at) - value);
      any |= Try(smaller);
      if (byte_of(best_, at) < value) value = byte_of(best_, at);
    }
    return any;
  }

  bool LowerBytes() {
    bool any = false;
    for (size_t i = 0; i < best_.knobs.size(); ++i) {
      any |= Lower([](Scenario& s, size_t at) -> uint8_t& { return s.knobs[at]; }, i);
    }
    for (size_t i = 0; i < best_.moves.size(); ++i) {
      any |= Lower([](Scenario& s, size_t at) -> uint8_t& { return s.moves[at].kind; }, i);
      any |= Lower([](Scenario& s, size_t at) -> uint8_t& { return s.moves[at].a; }, i);
      any |= Lower([](Scenario& s, size_t at) -> uint8_t& { return s.moves[at].b; }, i);
    }
    return any;
  }

  Scenario best_;
  Fault fault_;
  std::optional<std::string> failure_;
};

}  // namespace

Scenario Shrink(Scenario scenario, Fault fault) {
  return Shrinker(std::move(scenario), fault).Run();
}

}  // namespace tokenspeed::testing
