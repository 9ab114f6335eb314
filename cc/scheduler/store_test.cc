// SPDX-License-Identifier: MIT

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cc/testing/sched.h"
#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

using Ints = std::vector<int32_t>;
using Bits = std::vector<uint8_t>;

// A scheduler with a store, and what a test does with its transfers.
class StoreTest : public ::testing::Test {
 protected:
  StoreTest() { sched.blocks(32).host_blocks(32).store(); }

  void Settle(const Transfer& transfer, bool ok, const Bits& done) {
    (void)sched.get().SettleTransfer(transfer.id, {ok, -1, done}).value();
    sched.get().CheckInvariants();
  }
  // All of them, as a store would that has nothing.
  void SettleAll() {
    for (const Transfer& t : sched.get().TakeTransfers()) {
      if (t.kind == TransferKind::kCancel) continue;
      const bool asks = t.kind == TransferKind::kQuery || t.kind == TransferKind::kGet;
      Settle(t, true, asks ? Bits(t.hashes.size(), 0) : Bits());
    }
  }
  // The only transfer of a kind that was ordered since the last look.
  Transfer Only(TransferKind kind) {
    for (Transfer& t : sched.get().TakeTransfers()) {
      if (t.kind == kind) return std::move(t);
    }
    throw std::logic_error("no such transfer");
  }
  void RunAlone() {
    for (int still = 0; sched.get().HasWork(); ++still) {
      if (sched.step() != nullptr) still = 0;
      SettleAll();
      ASSERT_LT(still, 8);
    }
  }
  const StoreCounters& counters() { return sched.get().store_counters(); }
  bool TimeIs(int64_t now_us) { return sched.get().AdvanceClock(now_us).ok(); }

  Sched sched;
};

TEST_F(StoreTest, IsRefusedWithoutTheHostTierWhereItsBlocksArrive) {
  SchedulerConfig config = sched.config();
  config.num_host_blocks = 0;
  EXPECT_NE(Scheduler::Create(config).status().reason().find("store needs num_host_blocks"),
            std::string::npos);
  config.num_host_blocks = 8;
  config.store.max_backoff_us = 1;
  EXPECT_NE(Scheduler::Create(config).status().reason().find("store.max_backoff_us"),
            std::string::npos);
}

TEST_F(StoreTest, WhatItHasIsFetchedThroughTheHostTierBeforeTheRequestIsAdmitted) {
  sched.submit(Ask(1).prompt(18).max_new(2));
  EXPECT_EQ(sched.plan(), nullptr);
  const Transfer query = Only(TransferKind::kQuery);
  EXPECT_EQ(query.columns, (Ints{0, 1, 2, 3}));
  EXPECT_EQ(query.token_ids.size(), 16u);
  EXPECT_EQ(query.deadline_us, 1'000);
  Settle(query, true, {1, 1, 1, 0});
  const Transfer get = Only(TransferKind::kGet);
  EXPECT_EQ(get.columns, (Ints{0, 1, 2}));
  EXPECT_EQ(get.hashes, std::vector<uint64_t>(query.hashes.begin(), query.hashes.begin() + 3));
  EXPECT_EQ(sched.plan(), nullptr);
  Settle(get, true, {1, 1, 1});
  EXPECT_EQ(sched.plan(), nullptr);
  const Transfer load = Only(TransferKind::kLoad);
  EXPECT_EQ(load.host_blocks, get.host_blocks);
  Settle(load, true, {});
  EXPECT_EQ(sched.step()->context_lens, Ints{12});
  const RequestCounters seen = *sched.get().CountersOf(RequestId(1));
  EXPECT_EQ(seen.cached_tokens, 12);
  EXPECT_EQ(seen.store_tokens, 12);
  EXPECT_EQ(seen.host_tokens, 0);
  EXPECT_EQ(counters().hit_tokens, 12);
  RunAlone();
  EXPECT_EQ(sched.output(1).size(), 2u);
}

TEST_F(StoreTest, OnlyTheSoundPartOfAPartialGetIsUsed) {
  sched.submit(Ask(1).prompt(18).max_new(1));
  sched.plan();
  Settle(Only(TransferKind::kQuery), true, {1, 1, 1, 1});
  Settle(Only(TransferKind::kGet), true, {1, 0, 1, 1});
  EXPECT_EQ(counters().num_partial_gets, 1);
  EXPECT_EQ(counters().hit_tokens, 4);  // what hangs behind the hole is dropped
  sched.plan();
  const Transfer load = Only(TransferKind::kLoad);
  EXPECT_EQ(load.num_tokens, 4);
  Settle(load, true, {});
  RunAlone();
}

TEST_F(StoreTest, AMissOrAFailureCostsNothingButTheQuestion) {
  for (const bool ok : {true, false}) {
    const int64_t id = ok ? 1 : 2;
    sched.submit(Ask(id).prompt(18).max_new(1));
    EXPECT_EQ(sched.plan(), nullptr);
    Settle(Only(TransferKind::kQuery), ok, ok ? Bits{0, 0, 0, 0} : Bits{});
    EXPECT_EQ(sched.step()->context_lens, Ints{0});
    RunAlone();
  }
  EXPECT_EQ(counters().num_failures, 1);
  EXPECT_EQ(counters().num_gets, 0);
}

TEST_F(StoreTest, AfterTheDeadlineTheRequestGoesOnAndWhatComesLateIsStillGood) {
  sched.submit(Ask(1).prompt(18).max_new(1));
  sched.plan();
  Settle(Only(TransferKind::kQuery), true, {1, 1, 1, 1});
  const Transfer get = Only(TransferKind::kGet);
  EXPECT_TRUE(TimeIs(999));
  EXPECT_EQ(sched.plan(), nullptr);
  EXPECT_TRUE(TimeIs(1'000));
  EXPECT_EQ(counters().num_timeouts, 1);
  EXPECT_EQ(Only(TransferKind::kCancel).target, get.id);
  EXPECT_EQ(sched.plan()->context_lens, Ints{0});
  Settle(get, true, {1, 1, 1, 1});  // it was on its way; the host tier has it now
  EXPECT_EQ(counters().hit_tokens, 16);
  sched.settle();
  RunAlone();
  EXPECT_EQ(sched.num_ends(1), 1);
}

TEST_F(StoreTest, TheHostBlocksOfACancelledGetStayHeldUntilItSettles) {
  sched.submit(Ask(1).prompt(18));
  sched.plan();
  Settle(Only(TransferKind::kQuery), true, {1, 1, 1, 1});
  const Transfer get = Only(TransferKind::kGet);
  sched.abort(1);
  EXPECT_FALSE(sched.get().HasWork());
  EXPECT_EQ(Only(TransferKind::kCancel).target, get.id);
  EXPECT_FALSE(sched.get().FlushCache());  // it may still write
  Settle(get, false, {});
  EXPECT_TRUE(sched.get().FlushCache());
  EXPECT_EQ(sched.num_ends(1), 1);
  EXPECT_EQ(counters().num_failures, 0);  // nobody waited for it
}

TEST_F(StoreTest, ADeadOneIsNotAskedForEveryRequest) {
  sched.submit(Ask(1).prompt(18).max_new(1));
  sched.plan();
  Settle(Only(TransferKind::kQuery), false, {});
  RunAlone();
  sched.submit(Ask(2).prompt(18).max_new(1));
  EXPECT_NE(sched.step(), nullptr);
  EXPECT_EQ(counters().num_skipped, 1);
  RunAlone();
  EXPECT_TRUE(TimeIs(10'000));
  sched.submit(Ask(3).prompt(18).max_new(1)).submit(Ask(4).prompt(18).max_new(1));
  sched.step();
  EXPECT_EQ(counters().num_queries, 2);  // one finds out whether it is back
  EXPECT_EQ(counters().num_skipped, 2);
  RunAlone();
}

TEST_F(StoreTest, PublishedBlocksArePutFromTheHostTierAFewAtATime) {
  std::vector<Transfer> puts;
  for (int id = 1; id <= 6; ++id) {
    sched.submit(Ask(id).prompt(16).max_new(1));
    for (int i = 0; i < 6; ++i) {
      sched.step();
      for (Transfer& t : sched.get().TakeTransfers()) {
        if (t.kind == TransferKind::kPut) {
          puts.push_back(std::move(t));
        } else {
          Settle(t, true, t.kind == TransferKind::kQuery ? Bits(t.hashes.size(), 0) : Bits());
        }
      }
    }
  }
  ASSERT_EQ(puts.size(), 2u);  // nobody answered, so no further one was ordered
  for (const Transfer& put : puts) {
    EXPECT_EQ(put.host_blocks.size(), put.hashes.size());
    EXPECT_EQ(put.token_ids.size(), 4 * put.hashes.size());
    Settle(put, true, {});
  }
  EXPECT_EQ(counters().num_puts, 8);
  sched.plan();
  EXPECT_EQ(Only(TransferKind::kPut).hashes.size(), 16u);
}

TEST_F(StoreTest, AFullOneIsReadAllTheSame) {
  sched.submit(Ask(1).prompt(16).max_new(1));
  bool refused = false;
  for (int i = 0; i < 8; ++i) {
    sched.step();
    for (const Transfer& t : sched.get().TakeTransfers()) {
      refused = refused || t.kind == TransferKind::kPut;
      const bool is_query = t.kind == TransferKind::kQuery;
      Settle(t, t.kind != TransferKind::kPut, is_query ? Bits(t.hashes.size(), 0) : Bits());
    }
  }
  EXPECT_TRUE(refused);
  EXPECT_EQ(counters().num_failures, 1);
  EXPECT_EQ(counters().num_puts, 0);
  sched.submit(Ask(2).prompt(16).max_new(1));
  sched.plan();
  EXPECT_EQ(counters().num_queries, 2);
  RunAlone();
}

TEST_F(StoreTest, AnAnswerMustFitItsQuestionAndTimeMustNotGoBack) {
  sched.submit(Ask(1).prompt(18));
  sched.plan();
  const Transfer query = Only(TransferKind::kQuery);
  const Bits three(3, 1);
  auto refused = sched.get().SettleTransfer(query.id, {true, -1, three});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().reason(), "done must have 4 entries, got 3");
  EXPECT_TRUE(TimeIs(5));
  EXPECT_FALSE(TimeIs(4));
  Settle(query, true, Bits(4, 0));
  RunAlone();
}

TEST_F(StoreTest, OfSeveralGroupsThatIsFetchedFromWhichAllCanGoOn) {
  sched.blocks(80).host_blocks(80).window(8, 1, 1).state(8, 1);
  sched.submit(Ask(1).prompt(Tokens(9, 30)).max_new(1));
  sched.plan();
  const Transfer query = Only(TransferKind::kQuery);
  Bits there(query.hashes.size(), 1);
  for (size_t i = 0; i < there.size(); ++i) {
    if (query.groups[i] == 2 && query.columns[i] != 3) there[i] = 0;  // one state, behind 16 tokens
  }
  Settle(query, true, there);
  const Transfer get = Only(TransferKind::kGet);
  EXPECT_EQ(get.groups, (Ints{0, 0, 0, 0, 1, 1, 2}));
  EXPECT_EQ(get.columns, (Ints{0, 1, 2, 3, 2, 3, 3}));
  Settle(get, true, Bits(get.hashes.size(), 1));
  sched.plan();
  Settle(Only(TransferKind::kLoad), true, {});
  EXPECT_EQ(sched.step()->context_lens, Ints{16});
  RunAlone();
  EXPECT_EQ(sched.get().CountersOf(RequestId(1))->store_tokens, 16);
}

TEST_F(StoreTest, WhatAnEngineHasWhenItFallsIdleIsPutWithoutAPlan) {
  sched.submit(Ask(1).prompt(64).max_new(1));
  while (sched.get().HasWork()) {
    sched.step();
    for (const Transfer& t : sched.get().TakeTransfers()) {
      if (t.kind == TransferKind::kQuery) Settle(t, true, Bits(t.hashes.size(), 0));
      if (t.kind == TransferKind::kStore) Settle(t, true, {});
    }
  }
  EXPECT_EQ(Only(TransferKind::kPut).hashes.size(), 16u);
}

}  // namespace
}  // namespace tokenspeed::testing
