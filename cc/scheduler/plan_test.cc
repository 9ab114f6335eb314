// SPDX-License-Identifier: MIT

#include <vector>

#include "cc/testing/sched.h"
#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

using Ints = std::vector<int32_t>;

TEST(Plan, IsNullWhenThereIsNothingToDo) { EXPECT_EQ(Sched().plan(), nullptr); }

TEST(Plan, APromptInOneStepSamplesItsFirstToken) {
  Sched sched;
  sched.submit(Ask(1).prompt(6));
  const auto plan = sched.plan();
  EXPECT_EQ(plan->num_decode_rows, 0);
  EXPECT_EQ(plan->prompt_token_ids, Tokens(1, 6));
  EXPECT_EQ(plan->query_lens, Ints{6});
  EXPECT_EQ(plan->context_lens, Ints{0});
  EXPECT_EQ(plan->samples[0], 1);
  EXPECT_EQ(plan->new_slot_request_ids, std::vector<int64_t>{1});
  EXPECT_EQ(plan->new_slots, plan->slots);
}

TEST(Plan, ALongPromptIsCutIntoChunksAndSamplesInTheLast) {
  Sched sched;
  sched.budget(8).submit(Ask(1).prompt(20));
  Ints lens;
  Ints samples;
  for (int i = 0; i < 3; ++i) {
    const auto plan = sched.step();
    lens.push_back(plan->query_lens[0]);
    samples.push_back(plan->samples[0]);
  }
  EXPECT_EQ(lens, (Ints{8, 8, 4}));
  EXPECT_EQ(samples, (Ints{0, 0, 1}));
}

TEST(Plan, DecodesComeFirstAndTheRestOfTheBudgetPrefills) {
  Sched sched;
  sched.budget(10).submit(Ask(1).prompt(4));
  sched.step();
  sched.submit(Ask(2).prompt(30));
  const auto plan = sched.step();
  EXPECT_EQ(plan->request_ids, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(plan->num_decode_rows, 1);
  EXPECT_EQ(plan->query_lens, (Ints{1, 9}));
  EXPECT_EQ(plan->context_lens, (Ints{4, 0}));
}

TEST(Plan, TheDecodeGapBoundsThePrefillBesideADecode) {
  Sched sched;
  sched.budget(64).gap(6).submit(Ask(1).prompt(4).max_new(20));
  sched.step();
  sched.submit(Ask(2).prompt(40));
  for (int i = 0; i < 6; ++i) {
    const auto plan = sched.step();
    ASSERT_EQ(plan->num_decode_rows, 1);
    EXPECT_LE(plan->prompt_token_ids.size(), 6u);
  }
}

TEST(Plan, BesideADecodeChunksGetShorterWithTheirContext) {
  Sched sched;
  sched.budget(64).gap(16).context_cost(8).submit(Ask(1).prompt(4).max_new(40));
  sched.step();
  sched.submit(Ask(2).prompt(60));
  // 10 + 10 * 10 / 16 is 16, as is 6 + 6 * (2 * 10 + 6) / 16 less the fraction, and so on.
  for (const int32_t chunk : {10, 6, 5, 4, 3, 3}) {
    EXPECT_EQ(sched.step()->query_lens, (Ints{1, chunk}));
  }
}

TEST(Plan, APromptAdvancesBesideADecodeWhateverItsContextCosts) {
  Sched sched;
  sched.budget(64).gap(2).context_cost(1).submit(Ask(1).prompt(4).max_new(40));
  sched.step();
  sched.submit(Ask(2).prompt(20).max_new(2));
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(sched.step()->query_lens, (Ints{1, 1}));
  }
}

TEST(Plan, PromptsBesideAPromptThatEndsDoNotCountInItsGap) {
  // Its first token comes with the step that they shared: what it waits for next starts behind it.
  Sched sched;
  sched.budget(16).gap(16);
  for (int id = 1; id <= 5; ++id) sched.submit(Ask(id).prompt(8).max_new(20));
  EXPECT_EQ(sched.step()->query_lens, (Ints{8, 8}));
  EXPECT_EQ(sched.step()->query_lens, (Ints{1, 1, 8, 6}));
  EXPECT_EQ(sched.step()->query_lens, (Ints{1, 1, 1, 2, 8}));
}

TEST(Plan, WithoutADecodeAContextCostsNothing) {
  Sched sched;
  sched.budget(64).gap(6).context_cost(1).submit(Ask(1).prompt(100));
  EXPECT_EQ(sched.step()->query_lens, Ints{64});
  EXPECT_EQ(sched.step()->query_lens, Ints{36});
}

TEST(Plan, WithoutADecodeTheGapDoesNotBound) {
  Sched sched;
  sched.budget(64).gap(6).submit(Ask(1).prompt(40));
  EXPECT_EQ(sched.step()->query_lens, Ints{40});
}

TEST(WholePrompts, AreNeverCut) {
  Sched sched;
  sched.whole_prompts().budget(32);
  for (int id = 1; id <= 4; ++id) sched.submit(Ask(id).prompt(20).max_new(3));
  while (sched.get().HasWork()) {
    const auto plan = sched.step();
    for (int row = plan->num_decode_rows; row < plan->num_rows(); ++row) {
      EXPECT_EQ(plan->query_lens[static_cast<size_t>(row)], 20);
    }
  }
}

TEST(WholePrompts, APromptThatFitsOnlyAloneGetsAStepWithoutDecodes) {
  Sched sched;
  sched.whole_prompts().budget(32).submit(Ask(1).prompt(4).max_new(20));
  sched.step();
  sched.submit(Ask(2).prompt(32).max_new(2));
  EXPECT_EQ(sched.step()->request_ids, std::vector<int64_t>{1});
  const auto alone = sched.step();
  EXPECT_EQ(alone->request_ids, std::vector<int64_t>{2});
  EXPECT_EQ(sched.step()->num_decode_rows, 2);
  EXPECT_EQ(sched.get().CountersOf(RequestId(1))->num_delayed, 1);
}

TEST(Plan, TheTableDeltasRebuildTheTables) {
  Sched sched;
  sched.submit(Ask(1).prompt(9).max_new(12))
      .submit(Ask(2).prompt(3).max_new(9))
      .submit(Ask(3).prompt(30));
  std::vector<int32_t> mirror(sched.get().tables(0).cells().size(), 0);
  const auto columns = static_cast<size_t>(sched.get().tables(0).num_columns());
  while (sched.get().HasWork()) {
    const auto plan = sched.plan();
    for (const TableUpdate& u : plan->table_updates) {
      mirror[static_cast<size_t>(u.slot) * columns + static_cast<size_t>(u.column)] = u.block;
    }
    const auto cells = sched.get().tables(0).cells();
    EXPECT_EQ(mirror, std::vector<int32_t>(cells.begin(), cells.end()));
    for (int row = 0; row < plan->num_rows(); ++row) {
      const auto r = static_cast<size_t>(row);
      const int last = (plan->context_lens[r] + plan->query_lens[r] - 1) / 4;
      for (int c = 0; c <= last; ++c)
        EXPECT_NE(sched.get().tables(0).At(SlotId(plan->slots[r]), c), 0);
    }
    sched.settle();
  }
}

TEST(Overlap, DepthZeroPlansOneStepAtATime) {
  Sched sched;
  sched.submit(Ask(1));
  EXPECT_NE(sched.plan(), nullptr);
  EXPECT_EQ(sched.plan(), nullptr);
  sched.settle();
  EXPECT_NE(sched.plan(), nullptr);
}

TEST(Overlap, ADecodeIsPlannedBeforeItsTokenIsKnown) {
  Sched sched;
  sched.depth(1).submit(Ask(1).prompt(6));
  sched.plan();
  const auto second = sched.plan();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->num_decode_rows, 1);
  EXPECT_EQ(second->context_lens, Ints{6});
  EXPECT_TRUE(second->prompt_token_ids.empty());
  EXPECT_EQ(sched.plan(), nullptr);  // two are in flight
}

TEST(Overlap, NoStepIsPlannedBehindTheLengthLimit) {
  Sched sched;
  sched.depth(3).submit(Ask(1).prompt(6).max_new(2));
  EXPECT_NE(sched.plan(), nullptr);
  EXPECT_NE(sched.plan(), nullptr);
  EXPECT_EQ(sched.plan(), nullptr);
}

TEST(Overlap, WhatAStepBehindAStopSampledIsDropped) {
  Sched sched;
  sched.depth(1).script(1, {11, Sched::kEos}).submit(Ask(1).prompt(6).max_new(9));
  sched.run();
  EXPECT_EQ(sched.output(1), (Ints{11, Sched::kEos}));
  EXPECT_EQ(sched.num_ends(1), 1);
  EXPECT_EQ(sched.get().load().active_blocks, 0);
}

TEST(Overlap, TheBlocksOfAnEndedRequestStayUntilItsLastStepSettled) {
  Sched sched;
  sched.depth(1).no_cache().script(1, {Sched::kEos}).submit(Ask(1).prompt(6).max_new(9));
  sched.plan();
  sched.plan();
  sched.settle();
  EXPECT_EQ(sched.finish(1), Finish::kStop);
  EXPECT_EQ(sched.get().load().active_blocks, 2);
  sched.settle();
  EXPECT_EQ(sched.get().load().active_blocks, 0);
}

TEST(Overlap, GivesTheSameTokensAtEveryDepth) {
  std::vector<std::vector<Ints>> runs;
  for (int depth : {0, 1, 2, 5}) {
    Sched sched;
    sched.depth(depth).budget(16).blocks(40);
    for (int id = 1; id <= 6; ++id) sched.submit(Ask(id).prompt(5 * id).max_new(3 * id));
    sched.run();
    std::vector<Ints> outputs;
    for (int id = 1; id <= 6; ++id) outputs.push_back(sched.output(id));
    runs.push_back(outputs);
  }
  for (const auto& run : runs) EXPECT_EQ(run, runs[0]);
  EXPECT_EQ(runs[0][5].size(), 18u);
}

TEST(VerifyWidth, ADecodeRowCarriesTheLastTokenAndDrafts) {
  Sched sched;
  sched.width(4).accept(3).submit(Ask(1).prompt(6).max_new(8));
  sched.step();
  const auto plan = sched.step();
  EXPECT_EQ(plan->query_lens, Ints{4});
  EXPECT_EQ(plan->context_lens, Ints{6});
  EXPECT_EQ(sched.output(1).size(), 4u);
  EXPECT_EQ(sched.step()->context_lens, Ints{9});  // one known, three kept
}

TEST(VerifyWidth, GivesTheSameTokensHoweverManyAreAccepted) {
  std::vector<Ints> runs;
  for (int accepted : {1, 2, 4}) {
    for (int depth : {0, 1}) {
      Sched sched;
      sched.width(4).depth(depth).accept(accepted).submit(Ask(1).prompt(6).max_new(11)).run();
      runs.push_back(sched.output(1));
    }
  }
  for (const Ints& run : runs) EXPECT_EQ(run, runs[0]);
  EXPECT_EQ(runs[0].size(), 11u);
}

TEST(VerifyWidth, TokensBehindAStopAreNotKept) {
  Sched sched;
  sched.width(4).accept(4).script(1, {10, 11, Sched::kEos, 13}).submit(Ask(1).prompt(6).max_new(9));
  sched.run();
  EXPECT_EQ(sched.output(1), (Ints{10, 11, Sched::kEos}));
}

TEST(VerifyOverlap, RowsFollowRowsWhoseDraftsAreNotJudgedYet) {
  Sched sched;
  sched.width(4).depth(1).verify_overlap().submit(Ask(1).prompt(6).max_new(20));
  sched.plan();
  const auto first = sched.plan();
  EXPECT_EQ(first->context_lens[0], 6);
  EXPECT_EQ(first->context_slack[0], 0);
  sched.settle();
  const auto second = sched.plan();  // behind one to four tokens of the first
  EXPECT_EQ(second->context_lens[0], 10);
  EXPECT_EQ(second->context_slack[0], 3);
  sched.settle();
  const auto third = sched.plan();  // the first kept one, so the second began at 7
  EXPECT_EQ(third->context_lens[0], 11);
  EXPECT_EQ(third->context_slack[0], 3);
  sched.settle();
  sched.settle();
  sched.run();
  EXPECT_EQ(sched.output(1).size(), 20u);
}

TEST(VerifyOverlap, TheOutputIsTheSameUnderAnyDepthAndAcceptance) {
  for (int32_t depth = 0; depth < 4; ++depth) {
    for (int32_t accepted = 1; accepted <= 4; ++accepted) {
      Sched sched;
      sched.width(4).depth(depth).verify_overlap().accept(accepted);
      sched.state(8, 1).submit(Ask(1).prompt(6).max_new(19)).run();
      ASSERT_EQ(sched.output(1).size(), 19u);
      for (int i = 0; i < 19; ++i)
        EXPECT_EQ(sched.output(1)[static_cast<size_t>(i)], Sched::DefaultToken(1, i));
    }
  }
}

TEST(VerifyOverlap, ARowThatMayHaveToSaveAStateWaitsUntilItsPositionIsKnown) {
  Sched sched;
  sched.width(4).depth(2).verify_overlap().state(12, 1).submit(Ask(1).prompt(4).max_new(30));
  sched.plan();
  EXPECT_EQ(sched.plan()->query_lens[0], 4);  // from 4 on
  EXPECT_EQ(sched.plan(), nullptr);           // would start at 5 to 8 and could reach 12
  sched.settle();
  EXPECT_EQ(sched.plan(), nullptr);
  sched.settle();
  EXPECT_NE(sched.plan(), nullptr);
  sched.settle();
  sched.run();
}

TEST(VerifyOverlap, NoRowWritesBehindTheLastTokenOfItsRequest) {
  Sched sched;
  sched.width(4).depth(3).verify_overlap().submit(Ask(1).prompt(6).max_new(7));
  std::shared_ptr<const Plan> plan;
  while ((plan = sched.plan()) != nullptr) {
    EXPECT_LE(plan->context_lens[0] + plan->query_lens[0], 6 + 7 - 1);
  }
  while (sched.num_in_flight() > 0) sched.settle();
  sched.run();
  EXPECT_EQ(sched.output(1).size(), 7u);
}

TEST(Publishing, RequestsThatFillABlockTogetherPublishItInTurns) {
  Sched sched;
  sched.block_size(16).blocks(400).seqs(64).budget(1024);
  for (int id = 0; id < 64; ++id) sched.submit(Ask(id).prompt(15).max_new(20));
  while (sched.get().load().num_waiting > 0) sched.step();
  int32_t published = 0;
  sched.get().EnableKvEvents();
  for (int step = 0; step < 8; ++step) {
    sched.step();
    const auto events = static_cast<int32_t>(sched.get().TakeKvEvents().size());
    EXPECT_LE(events, 2 * 64 / 16 + 16);
    published += events;
  }
  EXPECT_EQ(published, 64);  // and nobody's is forgotten
  sched.run();
}

}  // namespace
}  // namespace tokenspeed::testing
