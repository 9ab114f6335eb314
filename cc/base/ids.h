// SPDX-License-Identifier: MIT
//
// Strong integer ids. A block number, a slot number and a request number are different types, so
// that none can be handed over where another is meant. They cost what an integer costs, order like
// integers (every tie in the scheduler is broken by an id, never by an address) and hash like
// integers. Pure values: no thread, no memory.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tokenspeed {

template <class Tag, class Rep>
class Id {
 public:
  using rep = Rep;
  constexpr Id() = default;
  constexpr explicit Id(Rep value) : value_(value) {}
  constexpr Rep value() const { return value_; }
  constexpr size_t index() const { return static_cast<size_t>(value_); }
  constexpr bool valid() const { return value_ >= 0; }
  constexpr auto operator<=>(const Id&) const = default;

 private:
  Rep value_ = -1;
};

// A unit of KV storage in the device pool. Block 0 is the padding block and is never handed out.
using BlockId = Id<struct BlockTag, int32_t>;
// A row of the request table: of the block tables here, of the sampling state in the engine.
using SlotId = Id<struct SlotTag, int32_t>;
// One forward of the model.
using StepId = Id<struct StepTag, int64_t>;
// The caller's number of a request.
using RequestId = Id<struct RequestTag, int64_t>;

}  // namespace tokenspeed

template <class Tag, class Rep>
struct std::hash<tokenspeed::Id<Tag, Rep>> {
  size_t operator()(const tokenspeed::Id<Tag, Rep>& id) const noexcept {
    return std::hash<Rep>{}(id.value());
  }
};
