// SPDX-License-Identifier: MIT

#include "cc/request/transitions.h"

#include <type_traits>

#include "cc/request/request.h"
#include "cc/request/transition_table.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

// clang-format off
constexpr int _ = kNoTransition;
enum : int { kSubm, kFetc, kRest, kRemo, kPref, kAwai, kDeco, kSend, kRetr, kFing, kDone };

// The whole truth: a row a state, a column an event. A pair that is _ here does not compile in the code.
constexpr int kExpected[11][18] = {
    //                        Prefetch Prefetched Admit  Restore Layers. Restored R.Failed Receive Received PromptS. TokenS. Send   Sent   PeerF. Retract Complete Abort  Drained
    /* Submitted          */ {kFetc,   _,         kPref, kRest,  _,      _,       _,       kRemo,  _,       _,       _,      _,     _,     _,     _,      _,       kDone, _},
    /* Prefetching        */ {_,       kSubm,     _,     _,      _,      _,       _,       _,      _,       _,       _,      _,     _,     _,     _,      _,       kDone, _},
    /* Restoring          */ {_,       _,         _,     _,      kPref,  kPref,   kRetr,   _,      _,       _,       _,      _,     _,     _,     _,      _,       kFing, _},
    /* RemotePrefilling   */ {_,       _,         _,     _,      _,      _,       _,       _,      kAwai,   _,       _,      _,     _,     kFing, _,      _,       kFing, _},
    /* Prefilling         */ {_,       _,         _,     _,      _,      _,       kRetr,   _,      _,       kAwai,   _,      _,     _,     _,     kRetr,  _,       kFing, _},
    /* AwaitingFirstToken */ {_,       _,         _,     _,      _,      _,       kRetr,   _,      _,       _,       kDeco,  kSend, _,     _,     kRetr,  kFing,   kFing, _},
    /* Decoding           */ {_,       _,         _,     _,      _,      _,       _,       _,      _,       _,       kDeco,  _,     _,     _,     kRetr,  kFing,   kFing, _},
    /* Sending            */ {_,       _,         _,     _,      _,      _,       _,       _,      _,       _,       _,      _,     kFing, kFing, _,      _,       kFing, _},
    /* Retracted          */ {_,       _,         kPref, kRest,  _,      _,       _,       _,      _,       _,       kRetr,  _,     _,     _,     _,      kFing,   kFing, _},
    /* Finishing          */ {_,       _,         _,     _,      _,      _,       _,       _,      _,       _,       _,      _,     _,     _,     _,      _,       _,     kDone},
    /* Finished           */ {_,       _,         _,     _,      _,      _,       _,       _,      _,       _,       _,      _,     _,     _,     _,      _,       _,     _},
};
// clang-format on

constexpr bool TableIsAsExpected() {
  for (size_t s = 0; s < kStateNames.size(); ++s) {
    for (size_t e = 0; e < kEventNames.size(); ++e) {
      if (kTransitions[s][e] != kExpected[s][e]) return false;
    }
  }
  return true;
}
static_assert(TableIsAsExpected(),
              "every (state, event) pair is callable exactly where the table says so");

template <class S>
constexpr bool IsMoveOnly = std::is_move_constructible_v<S> && std::is_move_assignable_v<S> &&
                            !std::is_copy_constructible_v<S> && !std::is_copy_assignable_v<S>;

TEST(Transitions, EveryStateIsMoveOnly) {
  static_assert(IsMoveOnly<Prefetching> && IsMoveOnly<Restoring>);
  static_assert(IsMoveOnly<RemotePrefilling> && IsMoveOnly<Sending>);
  static_assert(IsMoveOnly<Submitted> && IsMoveOnly<Prefilling> && IsMoveOnly<AwaitingFirstToken>);
  static_assert(IsMoveOnly<Decoding> && IsMoveOnly<Retracted> && IsMoveOnly<Finishing>);
  static_assert(IsMoveOnly<Finished> && IsMoveOnly<State>);
}

TEST(Transitions, AStateThatIsNotGivenUpCannotBeConsumed) {
  // An lvalue does not bind: the caller has to say std::move.
  static_assert(
      !std::is_invocable_v<decltype([](auto& s) -> decltype(On(s, event::Abort{})) {}), Decoding&>);
}

TEST(Transitions, FinishingRemembersItsCause) {
  Finished done = On(On(Retracted(), event::Complete{Finish::kLength}), event::Drained{});
  EXPECT_EQ(done.cause, Finish::kLength);
}

TEST(Request, AnEventForAnotherStateIsABrokenInvariant) {
  Request request(RequestId(1), {1, 2}, StopRule{4, 0, false, {}});
  EXPECT_THROW((Advance<Finishing>(request, event::Drained{})), InvariantViolation);
  EXPECT_TRUE(std::holds_alternative<Submitted>(request.state));
}

TEST(Request, AbortedInTheQueueIsFinishedAtOnce) {
  Request request(RequestId(1), {1, 2}, StopRule{4, 0, false, {}});
  Advance<Submitted>(request, event::Abort{});
  EXPECT_EQ(std::get<Finished>(request.state).cause, Finish::kAbort);
  EXPECT_EQ(HomeOf(request.state), nullptr);
}

}  // namespace
}  // namespace tokenspeed
