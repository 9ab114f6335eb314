// SPDX-License-Identifier: MIT

#include <string>
#include <vector>

#include "cc/testing/sched.h"
#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

std::string Refusal(SchedulerConfig config) { return Scheduler::Create(config).status().reason(); }

TEST(Groups, AreRefusedByFieldWhereTheyCannotBe) {
  SchedulerConfig config = Sched().config();
  config.groups.clear();
  EXPECT_NE(Refusal(config).find("groups is empty"), std::string::npos);
  config.groups = {{GroupKind::kWindow, 1, 8, 0}};
  EXPECT_NE(Refusal(config).find("groups[0].kind"), std::string::npos);
  config.groups = {{GroupKind::kFull, 65, 0, 0}};
  EXPECT_NE(Refusal(config).find("groups[0].blocks_per_parent"), std::string::npos);
  config.groups = {{GroupKind::kFull, 1, 0, 0}, {GroupKind::kState, 1, 0, 6}};
  EXPECT_NE(Refusal(config).find("groups[1].checkpoint_tokens"), std::string::npos);
}

TEST(WindowGroup, ALongRequestHoldsOnlyItsWindow) {
  Sched sched;
  sched.window(8, 1, 1).budget(8).no_cache().submit(Ask(1).prompt(60).max_new(20));
  for (int i = 0; i < 20; ++i) sched.step();
  // 72 tokens so far: 18 blocks of history (19 with room for the next), and no more than 4 of the
  // window.
  EXPECT_LE(sched.get().load().active_blocks, 19 + 4);
  sched.run();
  EXPECT_EQ(sched.output(1).size(), 20u);
  EXPECT_EQ(sched.get().load().active_blocks, 0);
}

TEST(WindowGroup, APrefixHitsWhereTheWindowBehindTheBoundaryIsThere) {
  Sched sched;
  sched.window(8, 1, 1).submit(Ask(1).prompt(Tokens(9, 32)).max_new(1)).run();
  sched.submit(Ask(2).prompt(Tokens(9, 40)).max_new(1));
  const auto plan = sched.step();
  EXPECT_EQ(plan->context_lens[0], 32);
  EXPECT_EQ(sched.cached(2), 32);
}

TEST(WindowGroup, APrefixHitsInsideABlockByACopyInEachGroup) {
  Sched sched;
  sched.window(4, 1, 1).budget(8).submit(Ask(1).prompt(Tokens(9, 32)).max_new(1)).run();
  std::vector<int32_t> other = Tokens(9, 14);
  other.push_back(77);
  sched.submit(Ask(2).prompt(other).max_new(1));
  const auto plan = sched.step();
  EXPECT_EQ(plan->context_lens[0], 14);
  EXPECT_EQ(plan->block_copies.size(), 1u);
  EXPECT_EQ(plan->groups[0].copies.size(), 1u);
}

TEST(StateGroup, APrefixHitsExactlyAtASavedState) {
  Sched sched;
  sched.state(8, 1).submit(Ask(1).prompt(Tokens(9, 30)).max_new(1)).run();
  sched.submit(Ask(2).prompt(Tokens(9, 23)).max_new(1));
  const auto plan = sched.step();
  EXPECT_EQ(plan->context_lens[0], 16);  // 20 tokens have blocks, 16 have a state
  ASSERT_EQ(plan->groups[0].copies.size(), 1u);
}

TEST(StateGroup, ChunksEndWhereStatesAreSaved) {
  Sched sched;
  sched.state(8, 1).submit(Ask(1).prompt(20).max_new(1));
  const auto plan = sched.plan();
  EXPECT_EQ(plan->query_lens[0], 8);
  ASSERT_EQ(plan->groups[0].saves.size(), 1u);
  EXPECT_EQ(plan->groups[0].saves[0].from, sched.get().tables(1).At(SlotId(plan->slots[0]), 0));
  sched.settle();
  sched.run();
}

TEST(StateGroup, AnAnswerLeavesStatesToo) {
  Sched sched;
  sched.state(8, 1).submit(Ask(1).prompt(Tokens(9, 6)).max_new(12)).run();
  std::vector<int32_t> turn = Tokens(9, 6);
  for (const int32_t token : sched.output(1)) turn.push_back(token);
  turn.push_back(77);
  sched.submit(Ask(2).prompt(turn).max_new(1));
  const auto plan = sched.step();
  EXPECT_EQ(sched.cached(2), 17);  // all but the last token, which was never read back
  EXPECT_EQ(plan->block_copies.size(), 1u);
  EXPECT_EQ(plan->groups[0].copies.size(), 1u);
}

TEST(StateGroup, ATailWhoseStateIsElsewhereIsNoHit) {
  Sched sched;
  sched.state(8, 1).submit(Ask(1).prompt(Tokens(9, 7)).max_new(1)).run();
  std::vector<int32_t> other = Tokens(9, 6);
  other.push_back(77);
  sched.submit(Ask(2).prompt(other).max_new(1)).run();
  EXPECT_EQ(sched.cached(2), 0);  // the state is behind 7 tokens, six are shared
}

TEST(StateGroup, RowsOfDraftsLeaveAStateBehindEachTokenAndTheNextRowSaysWhichItTakes) {
  Sched sched;
  sched.state(8, 1).width(4).accept(3).submit(Ask(1).prompt(6).max_new(12));
  EXPECT_EQ(sched.step()->groups[0].state_columns, std::vector<int32_t>{0});
  EXPECT_EQ(sched.step()->groups[0].state_columns, std::vector<int32_t>{0});
  const auto plan = sched.step();
  EXPECT_EQ(plan->context_lens[0], 9);
  EXPECT_EQ(plan->groups[0].state_columns, std::vector<int32_t>{2});
  sched.run();
}

TEST(StateGroup, AStateSavedBehindADraftThatWasNotKeptIsForgotten) {
  Sched sched;
  sched.state(8, 1).width(4).submit(Ask(1).prompt(Tokens(9, 6)).max_new(9));
  sched.step();
  const auto plan = sched.plan();  // positions 6..9: the state behind 8 tokens is in column 1
  ASSERT_EQ(plan->groups[0].saves.size(), 1u);
  EXPECT_EQ(plan->groups[0].saves[0].from, sched.get().tables(1).At(SlotId(plan->slots[0]), 1));
  const int32_t wrong = plan->groups[0].saves[0].to;
  sched.settle();  // only position 6 is kept
  const auto next = sched.plan();
  ASSERT_EQ(next->groups[0].saves.size(), 1u);
  EXPECT_EQ(next->groups[0].saves[0].from, sched.get().tables(1).At(SlotId(plan->slots[0]), 0));
  EXPECT_EQ(next->groups[0].saves[0].to, wrong);  // it was free again
  sched.settle();
  sched.run();
}

TEST(StateGroup, AFullPoolCostsHitsAndNotTheRequest) {
  Sched sched;
  // Five parents of history for 20 tokens, one for the working state: none is left to save in.
  sched.blocks(6).state(8, 1).submit(Ask(1).prompt(16).max_new(4)).run();
  EXPECT_EQ(sched.output(1).size(), 4u);
}

TEST(Groups, ShareOneMemoryWithBlocksOfDifferentSize) {
  Sched sched;
  sched.window(8, 2, 3).state(8, 5).blocks(40).budget(16);
  for (int id = 1; id <= 12; ++id) sched.submit(Ask(id).prompt(4 * id).max_new(3 * id));
  sched.run();
  for (int id = 1; id <= 12; ++id) {
    ASSERT_EQ(sched.output(id).size(), static_cast<size_t>(3 * id));
    for (int i = 0; i < 3 * id; ++i) {
      EXPECT_EQ(sched.output(id)[static_cast<size_t>(i)], Sched::DefaultToken(id, i));
    }
  }
  EXPECT_TRUE(sched.get().FlushCache());
  const Load load = sched.get().load();
  EXPECT_EQ(load.free_blocks, load.total_blocks);
}

TEST(Groups, WhatAllGroupsTogetherCannotHoldIsRefused) {
  Sched sched;
  sched.blocks(10).window(100, 1, 1);
  EXPECT_TRUE(sched.try_submit(Ask(1).prompt(16).max_new(5)).ok());  // 5 blocks in each group
  const Status refused = sched.try_submit(Ask(2).prompt(17).max_new(5));
  EXPECT_NE(refused.reason().find("all cache groups"), std::string::npos);
  sched.run();
}

TEST(Groups, RetractionResumesExactly) {
  Sched sched;
  sched.blocks(14).window(8, 1, 1).no_cache();
  for (int id = 1; id <= 3; ++id) sched.submit(Ask(id).prompt(8).max_new(16));
  sched.run();
  int retractions = 0;
  for (int id = 1; id <= 3; ++id) {
    retractions += sched.get().CountersOf(RequestId(id))->num_retractions;
    for (int i = 0; i < 16; ++i) {
      EXPECT_EQ(sched.output(id)[static_cast<size_t>(i)], Sched::DefaultToken(id, i));
    }
  }
  EXPECT_GT(retractions, 0);
}

}  // namespace
}  // namespace tokenspeed::testing
