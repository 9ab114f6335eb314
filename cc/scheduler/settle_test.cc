// SPDX-License-Identifier: MIT

#include <string>
#include <vector>

#include "cc/testing/sched.h"
#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

using Ints = std::vector<int32_t>;

std::string Refusal(Sched& sched, int64_t step, int32_t width, const Ints& tokens,
                    const Ints& counts) {
  const auto result = sched.get().Settle(StepId(step), {width, tokens, counts});
  return result.ok() ? "" : result.status().reason();
}

TEST(Settle, RefusesWhatDoesNotBelongToTheOldestStepAndChangesNothing) {
  Sched sched;
  EXPECT_EQ(Refusal(sched, 0, 1, {5}, {1}), "no step is in flight");
  sched.depth(1).submit(Ask(1).prompt(4));
  sched.plan();
  sched.plan();
  EXPECT_NE(Refusal(sched, 1, 1, {5}, {1}).find("step 0 is next"), std::string::npos);
  EXPECT_NE(Refusal(sched, 0, 1, {5, 6}, {1, 1}).find("1 rows"), std::string::npos);
  EXPECT_NE(Refusal(sched, 0, 1, {5}, {0}).find("num_tokens[0]"), std::string::npos);
  EXPECT_NE(Refusal(sched, 0, 2, {5, 6}, {2}).find("num_tokens[0]"), std::string::npos);
  EXPECT_NE(Refusal(sched, 0, 1, {-5}, {1}).find("negative"), std::string::npos);
  sched.run();
  EXPECT_EQ(sched.output(1).size(), 4u);
}

TEST(Settle, ARequestForOneTokenEndsWithItsPrompt) {
  Sched sched;
  sched.submit(Ask(1).prompt(6).max_new(1));
  sched.step();
  EXPECT_EQ(sched.finish(1), Finish::kLength);
  EXPECT_FALSE(sched.get().HasWork());
}

TEST(Settle, TellsTheTokenThatEndedIt) {
  Sched sched;
  sched.script(1, {10, 42}).submit(Ask(1).stop({42}));
  sched.step();
  sched.plan();
  const auto outcome = sched.settle();
  EXPECT_EQ(outcome->matched_tokens, Ints{42});
  EXPECT_EQ(outcome->completion_tokens, Ints{2});
  EXPECT_EQ(outcome->prompt_tokens, Ints{4});
  EXPECT_EQ(outcome->num_tokens, Ints{1});
}

TEST(Settle, AChunkThatDoesNotSampleIsNotMentioned) {
  Sched sched;
  sched.budget(8).submit(Ask(1).prompt(12));
  sched.plan();
  EXPECT_TRUE(sched.settle()->request_ids.empty());
}

TEST(Abort, IsTerminalAtOnceInEveryStateAndReturnsEveryBlock) {
  // Aborted after `moves` plans and settles: queued, prefilling, with a chunk or a token in flight,
  // decoding.
  for (int depth : {0, 1, 2}) {
    for (int moves = 0; moves < 24; ++moves) {
      Sched sched;
      sched.depth(depth).budget(8).submit(Ask(1).prompt(20).max_new(9));
      for (int i = 0; i < moves && sched.num_ends(1) == 0; ++i) {
        if (sched.plan() == nullptr && sched.num_in_flight() > 0) sched.settle();
      }
      const bool lived = sched.num_ends(1) == 0;
      EXPECT_EQ(sched.abort(1), lived);
      EXPECT_FALSE(sched.abort(1));
      while (sched.num_in_flight() > 0) sched.settle();
      EXPECT_EQ(sched.num_ends(1), 1);
      EXPECT_EQ(sched.get().load().active_blocks, 0);
      EXPECT_FALSE(sched.get().HasWork());
    }
  }
}

TEST(Abort, OfAnUnknownRequestSaysSo) { EXPECT_FALSE(Sched().abort(5)); }

TEST(Abort, TheSameIdCanRunAgainWhileTheOldOneStillHasAStepInFlight) {
  Sched sched;
  sched.depth(1).submit(Ask(1).prompt(6));
  sched.plan();
  sched.abort(1);
  sched.submit(Ask(1).prompt(Tokens(5, 6)));
  sched.run();
  EXPECT_EQ(sched.output(1).size(), 4u);
}

TEST(Abort, WhatSettledIsKeptForTheNextRequest) {
  Sched sched;
  sched.budget(8).submit(Ask(1).prompt(Tokens(9, 20)));
  sched.step();
  sched.plan();
  sched.abort(1);
  EXPECT_EQ(sched.get().load().cached_blocks, 0);  // the step in flight still uses the path
  sched.settle();
  EXPECT_EQ(sched.get().load().cached_blocks, 4);
}

TEST(Retraction, MakesRoomByTheYoungestAndItResumesExactly) {
  for (int depth : {0, 1, 2}) {
    Sched sched;
    sched.depth(depth).blocks(9).block_size(4).no_cache();
    for (int id = 1; id <= 3; ++id) sched.submit(Ask(id).prompt(8).max_new(16));
    sched.run();
    int retractions = 0;
    for (int id = 1; id <= 3; ++id) {
      const auto counters = sched.get().CountersOf(RequestId(id));
      retractions += counters->num_retractions;
      Ints expected;
      for (int i = 0; i < 16; ++i) expected.push_back(Sched::DefaultToken(id, i));
      EXPECT_EQ(sched.output(id), expected);
      EXPECT_EQ(sched.num_ends(id), 1);
    }
    EXPECT_GT(retractions, 0);
    EXPECT_EQ(sched.get().CountersOf(RequestId(1))->num_retractions, 0);
  }
}

TEST(Retraction, SparesTheBetterClass) {
  Sched sched;
  sched.blocks(7).block_size(4).no_cache();
  sched.submit(Ask(1).prompt(8).max_new(16).priority(1))
      .submit(Ask(2).prompt(8).max_new(16).priority(0));
  sched.run();
  EXPECT_GT(sched.get().CountersOf(RequestId(1))->num_retractions, 0);
  EXPECT_EQ(sched.get().CountersOf(RequestId(2))->num_retractions, 0);
}

TEST(Retraction, ATokenInFlightMayEndTheRetractedRequest) {
  Sched sched;
  sched.depth(1).blocks(5).block_size(4).no_cache();
  // Both need a new block at their 9th token; the younger one is told to stop right there.
  sched.script(2, {10, 11, 12, 13, Sched::kEos});
  sched.submit(Ask(1).prompt(4).max_new(14)).submit(Ask(2).prompt(4).max_new(14));
  sched.run();
  EXPECT_EQ(sched.output(2), (Ints{10, 11, 12, 13, Sched::kEos}));
  EXPECT_EQ(sched.output(1).size(), 14u);
  EXPECT_EQ(sched.num_ends(2), 1);
}

TEST(Counters, NameTheStepsOfARequestsLife) {
  Sched sched;
  sched.budget(8).submit(Ask(1).prompt(12).max_new(2)).run();
  const auto counters = sched.get().CountersOf(RequestId(1));
  ASSERT_TRUE(counters);
  EXPECT_EQ(counters->submitted_step, 0);
  EXPECT_EQ(counters->admitted_step, 0);
  EXPECT_EQ(counters->prefill_done_step, 1);
  EXPECT_EQ(counters->first_token_step, 1);
  EXPECT_EQ(counters->completion_tokens, 2);
  EXPECT_FALSE(sched.get().CountersOf(RequestId(99)));
}

TEST(KvEvents, TellWhatACompleteRequestLeftBehind) {
  Sched sched;
  sched.get().EnableKvEvents();
  sched.submit(Ask(1).prompt(Tokens(9, 12)).max_new(1)).run();
  const auto events = sched.get().TakeKvEvents();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(std::get<BlockStored>(events[0]).token_ids, Tokens(9, 4));
  EXPECT_TRUE(sched.get().TakeKvEvents().empty());
}

}  // namespace
}  // namespace tokenspeed::testing
