// SPDX-License-Identifier: MIT

#include <string>
#include <vector>

#include "cc/testing/sched.h"
#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

std::string Refusal(Sched& sched, const Ask& ask) {
  const Load before = sched.get().load();
  const Status status = sched.try_submit(ask);
  EXPECT_EQ(sched.get().load().num_waiting, before.num_waiting + (status.ok() ? 1 : 0));
  return status.reason();
}

TEST(Submit, RefusesWhatIsMalformedByField) {
  Sched sched;
  EXPECT_NE(Refusal(sched, Ask(-1)).find("request_id"), std::string::npos);
  EXPECT_NE(Refusal(sched, Ask(1).prompt(std::vector<int32_t>{})).find("token_ids is empty"),
            std::string::npos);
  EXPECT_NE(Refusal(sched, Ask(1).prompt({3, -7})).find("token_ids[1]"), std::string::npos);
  EXPECT_NE(Refusal(sched, Ask(1).max_new(0)).find("max_new_tokens"), std::string::npos);
  EXPECT_NE(Refusal(sched, Ask(1).max_new(-4)).find("max_new_tokens"), std::string::npos);
  EXPECT_NE(Refusal(sched, Ask(1).max_new(2).min_new(3)).find("min_new_tokens"), std::string::npos);
  EXPECT_NE(Refusal(sched, Ask(1).priority(2'000'000)).find("priority"), std::string::npos);
}

TEST(Submit, RefusesAnIdInUseAndTakesItAgainAfterItsEnd) {
  Sched sched;
  sched.submit(Ask(1));
  EXPECT_NE(Refusal(sched, Ask(1)).find("in use"), std::string::npos);
  sched.run();
  EXPECT_EQ(Refusal(sched, Ask(1)), "");
}

TEST(Submit, TheModelLengthIsExact) {
  Sched sched;
  sched.model_len(24);
  EXPECT_EQ(Refusal(sched, Ask(1).prompt(20).max_new(3)), "");
  EXPECT_EQ(Refusal(sched, Ask(2).prompt(20).max_new(4)), "");
  const std::string reason = Refusal(sched, Ask(3).prompt(20).max_new(5));
  EXPECT_NE(reason.find("20"), std::string::npos);
  EXPECT_NE(reason.find("max_model_len 24"), std::string::npos);
}

TEST(Submit, RefusesWhatThePoolCannotEverHold) {
  Sched sched;
  sched.blocks(4).block_size(4);
  EXPECT_EQ(Refusal(sched, Ask(1).prompt(12).max_new(5)), "");  // the 17th token needs no KV
  EXPECT_NE(Refusal(sched, Ask(2).prompt(12).max_new(6)).find("num_blocks 4"), std::string::npos);
  sched.run();
  EXPECT_EQ(sched.output(1).size(), 5u);
}

TEST(Submit, WithoutChunkingRefusesAPromptBeyondTheBudget) {
  Sched sched;
  sched.whole_prompts().budget(16);
  EXPECT_EQ(Refusal(sched, Ask(1).prompt(16)), "");
  EXPECT_NE(Refusal(sched, Ask(2).prompt(17)).find("max_batched_tokens 16"), std::string::npos);
}

TEST(Config, NamesTheFieldThatCannotBe) {
  const auto refusal = [](SchedulerConfig config) {
    return Scheduler::Create(config).status().reason();
  };
  SchedulerConfig good = Sched().config();
  SchedulerConfig config = good;
  config.num_blocks = 1;
  EXPECT_NE(refusal(config).find("num_blocks"), std::string::npos);
  config = good;
  config.block_size = 0;
  EXPECT_NE(refusal(config).find("block_size"), std::string::npos);
  config = good;
  config.overlap_depth = -1;
  EXPECT_NE(refusal(config).find("overlap_depth"), std::string::npos);
  config = good;
  config.max_batched_tokens = config.max_num_seqs - 1;
  EXPECT_NE(refusal(config).find("max_batched_tokens"), std::string::npos);
}

TEST(Admission, IsFirstComeFirstServedWithinAClass) {
  Sched sched;
  sched.seqs(1);
  for (int id : {3, 1, 2}) sched.submit(Ask(id).max_new(1));
  EXPECT_EQ(sched.step()->request_ids, std::vector<int64_t>{3});
  EXPECT_EQ(sched.step()->request_ids, std::vector<int64_t>{1});
  EXPECT_EQ(sched.step()->request_ids, std::vector<int64_t>{2});
}

TEST(Admission, ALowerPriorityNumberGoesFirst) {
  Sched sched;
  sched.seqs(1).submit(Ask(1).priority(1).max_new(1)).submit(Ask(2).priority(0).max_new(1));
  EXPECT_EQ(sched.step()->request_ids, std::vector<int64_t>{2});
}

TEST(Admission, AgeingLetsAWaitingClassOvertakeNewcomersOfABetterOne) {
  Sched sched;
  sched.seqs(1).submit(Ask(0).priority(1).max_new(1));
  int64_t id = 1;
  sched.submit(Ask(id).max_new(1));
  int steps = 0;
  for (; sched.num_ends(0) == 0 && steps < 1000; ++steps) {
    sched.submit(Ask(++id).max_new(1));  // there is always one of a better class
    sched.step();
  }
  EXPECT_GT(steps, 400);
  EXPECT_LT(steps, 600);
}

TEST(Admission, PrefersTheLongestCachedPrefixWithinTheWindow) {
  Sched sched;
  sched.seqs(1).submit(Ask(1).prompt(Tokens(7, 16)).max_new(1)).run();
  sched.submit(Ask(2).prompt(16).max_new(1)).submit(Ask(3).prompt(Tokens(7, 20)).max_new(1));
  EXPECT_EQ(sched.step()->request_ids, std::vector<int64_t>{3});
}

TEST(Admission, TheFrontIsPassedByABoundedNumberOfTimes) {
  Sched sched;
  sched.seqs(1).submit(Ask(1).prompt(Tokens(7, 16)).max_new(1)).run();
  sched.submit(Ask(2).prompt(16).max_new(1));
  int passed = 0;
  for (int id = 3; sched.num_ends(2) == 0 && passed < 100; ++id, ++passed) {
    sched.submit(Ask(id).prompt(Tokens(7, 20)).max_new(1));
    sched.step();
  }
  EXPECT_EQ(passed, 17);
}

TEST(SharedColdPrefix, IsComputedOnce) {
  Sched sched;
  for (int id = 0; id < 4; ++id) sched.submit(Ask(id).prompt(Tokens(9, 18)).max_new(2));
  int64_t prefill_tokens = 0;
  while (sched.get().HasWork()) {
    const auto plan = sched.step();
    if (plan) prefill_tokens += static_cast<int64_t>(plan->prompt_token_ids.size());
  }
  // The first computes 18; each of the others only what lies behind the 16 shared and published
  // tokens.
  EXPECT_EQ(prefill_tokens, 18 + 3 * 2);
  for (int id = 1; id < 4; ++id) EXPECT_EQ(sched.cached(id), 16);
}

TEST(SharedColdPrefix, ALongerPromptFollowsTheFirstChunkByChunk) {
  Sched sched;
  sched.budget(8)
      .submit(Ask(1).prompt(Tokens(9, 32)).max_new(1))
      .submit(Ask(2).prompt(Tokens(9, 40)).max_new(1));
  sched.run();
  EXPECT_EQ(sched.cached(1), 0);
  EXPECT_EQ(sched.cached(2), 32);
}

TEST(SharedColdPrefix, ItsWaitersGoOnWhenTheFirstIsAborted) {
  Sched sched;
  sched.budget(8).submit(Ask(1).prompt(Tokens(9, 32))).submit(Ask(2).prompt(Tokens(9, 32)));
  sched.step();
  sched.abort(1);
  sched.run();
  EXPECT_EQ(sched.output(2).size(), 4u);
  EXPECT_EQ(sched.cached(2), 8);
}

TEST(SharedColdPrefix, IsNotSharedAcrossSaltsOrAdapters) {
  Sched sched;
  sched.submit(Ask(1).prompt(Tokens(9, 16))).run();
  sched.submit(Ask(2).prompt(Tokens(9, 16)).salt(1))
      .submit(Ask(3).prompt(Tokens(9, 16)).adapter(1))
      .run();
  EXPECT_EQ(sched.cached(2), 0);
  EXPECT_EQ(sched.cached(3), 0);
}

TEST(PrefixCache, ARepeatedPromptComputesItsLastTokenOnly) {
  Sched sched;
  sched.submit(Ask(1).prompt(Tokens(9, 16)).max_new(1)).run();
  sched.submit(Ask(2).prompt(Tokens(9, 16)).max_new(1));
  const auto plan = sched.step();
  EXPECT_EQ(plan->context_lens[0], 15);
  EXPECT_EQ(plan->query_lens[0], 1);
  ASSERT_EQ(plan->block_copies.size(), 1u);
  EXPECT_EQ(sched.cached(2), 15);
}

TEST(PrefixCache, APromptThatFillsThePoolGoesWithoutTheTailThatItCouldCopy) {
  Sched sched;
  sched.blocks(3).submit(Ask(1).prompt(Tokens(9, 10)).max_new(1)).run();
  // Two full blocks are shared; its third block and the tail of the first prompt are one too many.
  std::vector<int32_t> other = Tokens(9, 9);
  other.push_back(77);
  sched.submit(Ask(2).prompt(other).max_new(1)).run();
  EXPECT_EQ(sched.cached(2), 8);
  sched.submit(Ask(3).prompt(Tokens(5, 2)).max_new(1)).run();
  EXPECT_EQ(sched.num_ends(3), 1);
}

TEST(PrefixCache, TheNextTurnHitsTheAnswerOfTheTurnBefore) {
  Sched sched;
  sched.submit(Ask(1).prompt(Tokens(9, 10)).max_new(5)).run();
  std::vector<int32_t> turn = Tokens(9, 10);
  for (int32_t token : sched.output(1)) turn.push_back(token);
  turn.push_back(77);
  sched.submit(Ask(2).prompt(turn)).run();
  EXPECT_EQ(sched.cached(2), 14);  // the answer's last token has no KV yet
}

TEST(PrefixCache, ANewWeightVersionHitsNothingOfTheOld) {
  Sched sched;
  sched.submit(Ask(1).prompt(Tokens(9, 16))).run();
  ASSERT_TRUE(sched.get().SetWeightVersion(1).ok());
  sched.submit(Ask(2).prompt(Tokens(9, 16))).run();
  EXPECT_EQ(sched.cached(2), 0);
  ASSERT_TRUE(sched.get().SetWeightVersion(0).ok());
  sched.submit(Ask(3).prompt(Tokens(9, 16))).run();
  EXPECT_EQ(sched.cached(3), 15);
}

TEST(PrefixCache, WhoRunsThroughAWeightChangeSharesNothing) {
  Sched sched;
  sched.submit(Ask(1).prompt(Tokens(9, 14)).max_new(8));
  sched.step();
  ASSERT_TRUE(sched.get().SetWeightVersion(1).ok());
  sched.run();
  sched.submit(Ask(2).prompt(Tokens(9, 14))).run();
  EXPECT_EQ(sched.cached(2), 0);
}

TEST(PrefixCache, OffMeansNothingIsKept) {
  Sched sched;
  sched.no_cache().submit(Ask(1).prompt(Tokens(9, 16))).run();
  EXPECT_EQ(sched.get().load().cached_blocks, 0);
  sched.submit(Ask(2).prompt(Tokens(9, 16))).run();
  EXPECT_EQ(sched.cached(2), 0);
}

TEST(FlushCache, IsRefusedWhileARequestHoldsBlocks) {
  Sched sched;
  sched.submit(Ask(1).prompt(Tokens(9, 16)));
  sched.step();
  EXPECT_FALSE(sched.get().FlushCache());
  sched.run();
  EXPECT_GT(sched.get().load().cached_blocks, 0);
  EXPECT_TRUE(sched.get().FlushCache());
  EXPECT_EQ(sched.get().load().free_blocks, sched.get().load().total_blocks);
}

}  // namespace
}  // namespace tokenspeed::testing
