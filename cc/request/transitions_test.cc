// SPDX-License-Identifier: MIT

#include "cc/request/transitions.h"

#include <type_traits>

#include "cc/request/request.h"
#include "cc/request/transition_table.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

constexpr int _ = kNoTransition;
enum : int { kSubmitted, kPrefilling, kAwaiting, kDecoding, kRetracted, kFinishing, kFinished };

// The whole truth: a row a state, a column an event. A pair that is _ here does not compile in the
// code.
constexpr int kExpected[7][7] = {
    //                Admit        PromptSch.  TokenSettled  Retract      Complete     Abort Drained
    /* Submitted  */ {kPrefilling, _, _, _, _, kFinished, _},
    /* Prefilling */ {_, kAwaiting, _, kRetracted, _, kFinishing, _},
    /* Awaiting   */ {_, _, kDecoding, kRetracted, kFinishing, kFinishing, _},
    /* Decoding   */ {_, _, kDecoding, kRetracted, kFinishing, kFinishing, _},
    /* Retracted  */ {kPrefilling, _, kRetracted, _, kFinishing, kFinishing, _},
    /* Finishing  */ {_, _, _, _, _, _, kFinished},
    /* Finished   */ {_, _, _, _, _, _, _},
};

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
