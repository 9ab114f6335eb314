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

std::shared_ptr<const Outcome> Settle(Sched& sched, const Transfer& transfer, bool ok,
                                      int32_t first_token = -1) {
  const auto outcome = sched.get().SettleTransfer(transfer.id, {ok, first_token, {}}).value();
  sched.get().CheckInvariants();
  return outcome;
}

// Runs a request to its end and lets its blocks be stored.
void RunAndStore(Sched& sched, const Ask& ask) {
  sched.submit(ask).run();
  sched.plan();
  for (const Transfer& transfer : sched.get().TakeTransfers()) Settle(sched, transfer, true);
}

TEST(HostTier, PublishedBlocksAreStoredAndComeBackAfterEviction) {
  Sched sched;
  sched.blocks(8).host_blocks(16);
  RunAndStore(sched, Ask(1).prompt(Tokens(9, 16)).max_new(1));
  RunAndStore(sched, Ask(2).prompt(32).max_new(1));  // drives the first one off the device
  sched.submit(Ask(3).prompt(Tokens(9, 18)).max_new(2));
  EXPECT_EQ(sched.plan(), nullptr);  // it waits for its load
  const auto transfers = sched.get().TakeTransfers();
  ASSERT_EQ(transfers.size(), 1u);
  EXPECT_EQ(transfers[0].kind, TransferKind::kLoad);
  EXPECT_EQ(transfers[0].device_blocks.size(), 4u);
  Settle(sched, transfers[0], true);
  const auto plan = sched.step();
  EXPECT_EQ(plan->context_lens, Ints{16});
  EXPECT_EQ(plan->query_lens, Ints{2});
  EXPECT_EQ(plan->new_slot_request_ids, std::vector<int64_t>{3});
  sched.run();
  EXPECT_EQ(sched.cached(3), 16);
}

TEST(HostTier, AFailedLoadIsComputedInstead) {
  Sched sched;
  sched.blocks(8).host_blocks(16);
  RunAndStore(sched, Ask(1).prompt(Tokens(9, 16)).max_new(1));
  RunAndStore(sched, Ask(2).prompt(32).max_new(1));
  sched.submit(Ask(3).prompt(Tokens(9, 18)).max_new(2));
  sched.plan();
  EXPECT_EQ(sched.get().CountersOf(RequestId(3))->host_tokens, 16);
  Settle(sched, sched.get().TakeTransfers().at(0), false);
  sched.run();
  EXPECT_EQ(sched.output(3).size(), 2u);
  EXPECT_EQ(sched.get().CountersOf(RequestId(3))->host_tokens, 0);
  EXPECT_EQ(sched.cached(3), 0);
}

TEST(HostTier, AFailedStoreLeavesNothingBehind) {
  Sched sched;
  sched.blocks(8).host_blocks(16);
  sched.submit(Ask(1).prompt(Tokens(9, 16)).max_new(1)).run();
  sched.plan();
  for (const Transfer& transfer : sched.get().TakeTransfers()) Settle(sched, transfer, false);
  RunAndStore(sched, Ask(2).prompt(32).max_new(1));
  sched.submit(Ask(3).prompt(Tokens(9, 18)).max_new(1)).run();
  EXPECT_EQ(sched.cached(3), 0);
}

TEST(HostTier, AFullTierCostsHitsOnly) {
  Sched sched;
  sched.blocks(8).host_blocks(1);
  RunAndStore(sched, Ask(1).prompt(Tokens(9, 16)).max_new(1));
  RunAndStore(sched, Ask(2).prompt(32).max_new(1));
  EXPECT_EQ(sched.num_ends(2), 1);
}

TEST(HostTier, TheBlocksOfALoadStayUntilItSettledThoughItsRequestIsGone) {
  Sched sched;
  sched.blocks(8).host_blocks(16);
  RunAndStore(sched, Ask(1).prompt(Tokens(9, 16)).max_new(1));
  RunAndStore(sched, Ask(2).prompt(32).max_new(1));
  sched.submit(Ask(3).prompt(Tokens(9, 18)));
  sched.plan();
  const Transfer load = sched.get().TakeTransfers().at(0);
  sched.abort(3);
  EXPECT_EQ(sched.get().load().active_blocks, 5);
  EXPECT_TRUE(sched.get().HasWork());
  Settle(sched, load, true);
  EXPECT_EQ(sched.get().load().active_blocks, 0);
  EXPECT_EQ(sched.num_ends(3), 1);
}

TEST(HostTier, ARetractedRequestComesBackFromIt) {
  Sched sched;
  sched.blocks(9).host_blocks(32);
  for (int id = 1; id <= 3; ++id) sched.submit(Ask(id).prompt(8).max_new(16));
  int loads = 0;
  while (sched.get().HasWork()) {
    sched.step();
    for (const Transfer& transfer : sched.get().TakeTransfers()) {
      loads += transfer.kind == TransferKind::kLoad ? 1 : 0;
      Settle(sched, transfer, true);
    }
  }
  EXPECT_GT(loads, 0);
  for (int id = 1; id <= 3; ++id) {
    for (int i = 0; i < 16; ++i)
      EXPECT_EQ(sched.output(id)[static_cast<size_t>(i)], Sched::DefaultToken(id, i));
  }
}

TEST(HostTier, WhatOneTransferHasNoRoomForFollowsWhenItSettled) {
  Sched sched;
  sched.blocks(320).host_blocks(320).model_len(2000).budget(2000);
  sched.submit(Ask(1).prompt(1200).max_new(1)).run();  // 300 blocks, and nobody plans after it
  int32_t num_stores = 0;
  for (auto stores = sched.get().TakeTransfers(); !stores.empty();
       stores = sched.get().TakeTransfers()) {
    for (const Transfer& store : stores) Settle(sched, store, true);
    num_stores += static_cast<int32_t>(stores.size());
  }
  EXPECT_GT(num_stores, 1);
  EXPECT_EQ(sched.get().load().host_cached_blocks, 300);
}

TEST(HostTier, FlushingWaitsForTheCopyUnderWayAndForNoOther) {
  Sched sched;
  sched.blocks(320).host_blocks(320).model_len(2000).budget(2000);
  sched.submit(Ask(1).prompt(1200).max_new(1)).run();  // more than one store's worth
  const auto stores = sched.get().TakeTransfers();
  ASSERT_EQ(stores.size(), 1u);
  EXPECT_FALSE(sched.get().FlushCache());
  Settle(sched, stores[0], true);
  EXPECT_TRUE(sched.get().TakeTransfers().empty());
  EXPECT_TRUE(sched.get().FlushCache());
  EXPECT_EQ(sched.get().load().host_cached_blocks, 0);
}

TEST(HostTier, IsCountedByStateAndEmptyUnderNewWeights) {
  Sched sched;
  sched.blocks(8).host_blocks(6);
  sched.submit(Ask(1).prompt(Tokens(9, 16)).max_new(1)).run();
  const auto store = sched.get().TakeTransfers().at(0);
  EXPECT_EQ(sched.get().load().host_reserved_blocks, 4);
  EXPECT_EQ(sched.get().load().host_free_blocks, 2);
  Settle(sched, store, true);
  EXPECT_EQ(sched.get().load().host_cached_blocks, 4);
  EXPECT_EQ(sched.get().load().host_reserved_blocks, 0);
  ASSERT_TRUE(sched.get().SetWeightVersion(1).ok());
  EXPECT_EQ(sched.get().load().host_cached_blocks, 0);
  EXPECT_EQ(sched.get().load().host_free_blocks, 6);
  sched.get().CheckInvariants();
  sched.submit(Ask(2).prompt(Tokens(9, 18)).max_new(1)).run();
  EXPECT_EQ(sched.cached(2), 0);
}

// A host tier that has 16 tokens of family 9, which the device has lost again; request 3 wants 18.
void WantWhatIsOnTheHost(Sched& sched) {
  sched.blocks(8).host_blocks(16).depth(1);
  RunAndStore(sched, Ask(1).prompt(Tokens(9, 16)).max_new(1));
  RunAndStore(sched, Ask(2).prompt(32).max_new(1));
  sched.submit(Ask(3).prompt(Tokens(9, 18)).max_new(3));
}

TEST(LayerwiseLoad, AStepRunsBehindTheLoadOnceEnoughLayersAreThere) {
  Sched sched;
  sched.layers(4, 2);
  WantWhatIsOnTheHost(sched);
  EXPECT_EQ(sched.plan(), nullptr);
  const Transfer load = sched.get().TakeTransfers().at(0);
  EXPECT_TRUE(sched.get().ProgressTransfer(load.id, 1).ok());
  EXPECT_EQ(sched.plan(), nullptr);
  EXPECT_TRUE(sched.get().ProgressTransfer(load.id, 3).ok());
  const auto plan = sched.plan();
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->context_lens, Ints{16});
  ASSERT_EQ(plan->load_waits.size(), 1u);
  EXPECT_EQ(plan->load_waits[0].transfer_id, load.id);
  EXPECT_EQ(plan->load_waits[0].layers_done, 3);
  const auto next = sched.plan();  // its first decode row runs behind the load too
  EXPECT_EQ(next->num_decode_rows, 1);
  EXPECT_EQ(next->load_waits.size(), 1u);
  Settle(sched, load, true);
  sched.settle();
  sched.settle();
  EXPECT_TRUE(sched.plan()->load_waits.empty());
  sched.settle();
  sched.run();
  EXPECT_EQ(sched.output(3).size(), 3u);
}

TEST(LayerwiseLoad, WithNoLeadTheStepIsInTheSamePlanAsItsLoad) {
  Sched sched;
  sched.layers(4, 0);
  WantWhatIsOnTheHost(sched);
  const auto plan = sched.plan();
  ASSERT_NE(plan, nullptr);
  const Transfer load = sched.get().TakeTransfers().at(0);
  EXPECT_EQ(plan->load_waits[0].transfer_id, load.id);
  EXPECT_EQ(plan->load_waits[0].layers_done, 0);
  Settle(sched, load, true);
  sched.settle();
  sched.run();
}

TEST(LayerwiseLoad, AStepDoesNotSettleBeforeTheLoadThatItRunsBehind) {
  Sched sched;
  sched.layers(4, 0);
  WantWhatIsOnTheHost(sched);
  const auto plan = sched.plan();
  const Ints one = {1};
  const auto refused = sched.get().Settle(StepId(plan->step_id), {1, one, one});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(const_cast<Result<std::shared_ptr<const Outcome>>&>(refused).status().reason().find(
                "has to settle first"),
            std::string::npos);
  Settle(sched, sched.get().TakeTransfers().at(0), true);
  sched.settle();
  sched.run();
}

TEST(LayerwiseLoad, ALoadThatFailsUnderLaunchedStepsRestartsItsRequestFromWhatIsSound) {
  Sched sched;
  sched.layers(4, 0);
  WantWhatIsOnTheHost(sched);
  sched.plan();
  sched.plan();
  Settle(sched, sched.get().TakeTransfers().at(0), false);
  EXPECT_EQ(sched.get().load().num_running, 0);
  EXPECT_EQ(sched.settle()->request_ids.size(), 0u);  // computed on rubbish: nobody hears of it
  EXPECT_EQ(sched.plan(), nullptr);                   // one more such row is in flight
  EXPECT_EQ(sched.settle()->request_ids.size(), 0u);
  const auto plan = sched.plan();
  EXPECT_EQ(plan->context_lens, Ints{0});
  EXPECT_TRUE(plan->load_waits.empty());
  sched.settle();
  sched.run();
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(sched.output(3)[static_cast<size_t>(i)], Sched::DefaultToken(3, i));
}

TEST(LayerwiseLoad, AnAbortUnderLaunchedStepsKeepsTheBlocksUntilTheLastOfThemSettled) {
  for (const bool ok : {true, false}) {
    Sched sched;
    sched.layers(4, 0);
    WantWhatIsOnTheHost(sched);
    sched.plan();
    const Transfer load = sched.get().TakeTransfers().at(0);
    sched.abort(3);
    EXPECT_EQ(sched.get().load().active_blocks, 5);
    Settle(sched, load, ok);
    EXPECT_EQ(sched.get().load().active_blocks, 5);
    sched.settle();
    EXPECT_EQ(sched.get().load().active_blocks, 0);
    EXPECT_FALSE(sched.get().HasWork());
    EXPECT_EQ(sched.num_ends(3), 1);
  }
}

TEST(LayerwiseLoad, ProgressIsOfALoadAndOnlyGoesForward) {
  Sched sched;
  sched.layers(4, 4);
  WantWhatIsOnTheHost(sched);
  sched.plan();
  const Transfer load = sched.get().TakeTransfers().at(0);
  EXPECT_FALSE(sched.get().ProgressTransfer(load.id + 1, 1).ok());
  EXPECT_FALSE(sched.get().ProgressTransfer(load.id, 5).ok());
  EXPECT_TRUE(sched.get().ProgressTransfer(load.id, 4).ok());
  EXPECT_FALSE(sched.get().ProgressTransfer(load.id, 3).ok());
  EXPECT_EQ(sched.plan(), nullptr);  // with a lead of all layers it waits for the end
  Settle(sched, load, true);
  sched.run();
}

TEST(HostTier, WhatARetractionTakesAwayIsStoredBeforeItCanBeEvicted) {
  Sched sched;
  sched.blocks(9).host_blocks(32);
  for (int id = 1; id <= 3; ++id) sched.submit(Ask(id).prompt(8).max_new(16));
  std::vector<Transfer> stores;
  const auto is_retracted = [&] {
    for (int id = 1; id <= 3; ++id) {
      if (sched.get().CountersOf(RequestId(id))->num_retractions > 0) return true;
    }
    return false;
  };
  while (!is_retracted()) {
    sched.step();
    for (Transfer& t : sched.get().TakeTransfers()) stores.push_back(std::move(t));
    if (!is_retracted()) {
      for (const Transfer& t : std::exchange(stores, {})) Settle(sched, t, true);
    }
  }
  ASSERT_FALSE(stores.empty());  // reserved in the host tier, and pinned until the copy is done
  for (const Transfer& t : stores) Settle(sched, t, true);
  while (sched.get().HasWork()) {
    sched.step();
    for (const Transfer& t : sched.get().TakeTransfers()) Settle(sched, t, true);
  }
  EXPECT_EQ(sched.output(3).size(), 16u);
}

TEST(HostTier, SeveralGroupsComeBackTogetherWhereAllOfThemCanGoOn) {
  Sched sched;
  sched.blocks(40).host_blocks(400).window(8, 1, 1).state(8, 1);
  RunAndStore(sched, Ask(1).prompt(Tokens(9, 30)).max_new(1));
  for (int id = 20; id < 26; ++id) RunAndStore(sched, Ask(id).prompt(60).max_new(1));
  sched.submit(Ask(3).prompt(Tokens(9, 30)).max_new(1));
  EXPECT_EQ(sched.plan(), nullptr);
  const Transfer load = sched.get().TakeTransfers().at(0);
  EXPECT_EQ(load.num_tokens, 24);  // the last state that was saved
  EXPECT_EQ(std::ranges::count(load.groups, 0), 6);
  EXPECT_EQ(std::ranges::count(load.groups, 1), 2);  // a window of 8 tokens
  EXPECT_EQ(std::ranges::count(load.groups, 2), 1);
  Settle(sched, load, true);
  sched.run();
  EXPECT_EQ(sched.cached(3), 24);
}

TEST(RemoteRoles, CarryTheBlocksOfEveryGroup) {
  Sched prefill;
  prefill.role(Role::kPrefill).window(8, 1, 1).state(8, 1).submit(Ask(1).prompt(22));
  while (prefill.step() != nullptr) {
  }
  const Transfer send = prefill.get().TakeTransfers().at(0);
  Sched decode;
  decode.role(Role::kDecode).window(8, 1, 1).state(8, 1).submit(Ask(1).prompt(22).max_new(4));
  decode.plan();
  const Transfer receive = decode.get().TakeTransfers().at(0);
  EXPECT_EQ(send.groups, receive.groups);
  EXPECT_EQ(send.columns, receive.columns);
  EXPECT_EQ(receive.columns, (Ints{0, 1, 2, 3, 4, 5, 3, 4, 5, 0}));
  Settle(decode, receive, true, Sched::DefaultToken(1, 0));
  decode.run();
  EXPECT_EQ(decode.output(1).size(), 3u);
}

TEST(Transfers, AnUnknownOneIsRefused) {
  Sched sched;
  const auto result = sched.get().SettleTransfer(5, {true, -1, {}});
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().reason(), "transfer 5 is not in flight");
}

TEST(PrefillRole, ComputesThePromptSendsItAndEnds) {
  Sched sched;
  sched.role(Role::kPrefill).submit(Ask(1).prompt(6).max_new(9));
  sched.plan();
  const auto first = sched.settle();
  EXPECT_EQ(first->num_tokens, Ints{1});
  EXPECT_EQ(sched.num_ends(1), 0);
  EXPECT_EQ(sched.plan(), nullptr);  // it never decodes
  const auto transfers = sched.get().TakeTransfers();
  ASSERT_EQ(transfers.size(), 1u);
  EXPECT_EQ(transfers[0].kind, TransferKind::kSend);
  EXPECT_EQ(transfers[0].num_tokens, 6);
  EXPECT_EQ(sched.get().load().active_blocks, 2);
  const auto last = Settle(sched, transfers[0], true);
  EXPECT_EQ(last->finish, std::vector<uint8_t>{static_cast<uint8_t>(Finish::kLength)});
  EXPECT_EQ(last->rows, Ints{-1});
  EXPECT_EQ(sched.get().load().active_blocks, 0);
  EXPECT_FALSE(sched.get().HasWork());
}

TEST(PrefillRole, AFailedSendEndsTheRequestAndKeepsThePrefix) {
  Sched sched;
  sched.role(Role::kPrefill).submit(Ask(1).prompt(Tokens(9, 8)));
  sched.step();
  const auto last = Settle(sched, sched.get().TakeTransfers().at(0), false);
  EXPECT_EQ(last->finish, std::vector<uint8_t>{static_cast<uint8_t>(Finish::kAbort)});
  EXPECT_EQ(sched.get().load().cached_blocks, 2);
}

TEST(DecodeRole, ReceivesThePromptAndDecodesFromTheRemoteToken) {
  Sched sched;
  sched.role(Role::kDecode).submit(Ask(1).prompt(6).max_new(3));
  EXPECT_EQ(sched.plan(), nullptr);
  const Transfer receive = sched.get().TakeTransfers().at(0);
  EXPECT_EQ(receive.kind, TransferKind::kReceive);
  EXPECT_EQ(receive.first_token, 0);
  const auto outcome = Settle(sched, receive, true, Sched::DefaultToken(1, 0));
  EXPECT_EQ(outcome->num_tokens, Ints{1});
  const auto plan = sched.step();
  EXPECT_EQ(plan->num_decode_rows, 1);
  EXPECT_EQ(plan->context_lens, Ints{6});
  EXPECT_EQ(plan->new_slot_request_ids, std::vector<int64_t>{1});
  sched.run();
  EXPECT_EQ(sched.output(1), (Ints{Sched::DefaultToken(1, 1), Sched::DefaultToken(1, 2)}));
  EXPECT_EQ(sched.finish(1), Finish::kLength);
}

TEST(DecodeRole, ARemoteTokenThatStopsEndsTheRequest) {
  Sched sched;
  sched.role(Role::kDecode).submit(Ask(1).prompt(6).max_new(3));
  sched.plan();
  const auto outcome = Settle(sched, sched.get().TakeTransfers().at(0), true, Sched::kEos);
  EXPECT_EQ(outcome->finish, std::vector<uint8_t>{static_cast<uint8_t>(Finish::kStop)});
  EXPECT_FALSE(sched.get().HasWork());
}

TEST(DecodeRole, ADeadPeerEndsTheRequestAndItsPartialKvIsNeverShared) {
  Sched sched;
  sched.role(Role::kDecode).submit(Ask(1).prompt(Tokens(9, 8)));
  sched.plan();
  const auto outcome = Settle(sched, sched.get().TakeTransfers().at(0), false);
  EXPECT_EQ(outcome->finish, std::vector<uint8_t>{static_cast<uint8_t>(Finish::kAbort)});
  EXPECT_EQ(sched.get().load().cached_blocks, 0);
  EXPECT_EQ(sched.get().load().active_blocks, 0);
}

TEST(DecodeRole, FetchesOnlyWhatItDoesNotHave) {
  Sched sched;
  sched.role(Role::kDecode).submit(Ask(1).prompt(Tokens(9, 8)).max_new(1));
  sched.plan();
  Settle(sched, sched.get().TakeTransfers().at(0), true, 5);
  sched.submit(Ask(2).prompt(Tokens(9, 12)).max_new(1));
  sched.plan();
  const Transfer receive = sched.get().TakeTransfers().at(0);
  EXPECT_EQ(receive.first_token, 8);
  EXPECT_EQ(receive.num_tokens, 12);
}

TEST(DecodeRole, AReceiveWithoutItsTokenIsRefused) {
  Sched sched;
  sched.role(Role::kDecode).submit(Ask(1));
  sched.plan();
  const auto id = sched.get().TakeTransfers().at(0).id;
  EXPECT_FALSE(sched.get().SettleTransfer(id, {true, -1, {}}).ok());
  EXPECT_TRUE(sched.get().SettleTransfer(id, {true, 7, {}}).ok());
}

TEST(Pause, AbortEndsEveryRequestOnce) {
  Sched sched;
  sched.seqs(1).submit(Ask(2)).submit(Ask(1));
  sched.step();
  const auto ends = sched.get().Pause(PauseMode::kAbort);
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends[0].request_id, 1);
  EXPECT_FALSE(sched.get().HasWork());
}

TEST(Pause, WaitLetsRunnersEndAndAdmitsNobodyUntilResume) {
  Sched sched;
  sched.submit(Ask(1));
  sched.step();
  EXPECT_TRUE(sched.get().Pause(PauseMode::kWait).empty());
  sched.submit(Ask(2));
  while (sched.step() != nullptr) {
  }
  EXPECT_EQ(sched.num_ends(1), 1);
  EXPECT_EQ(sched.num_ends(2), 0);
  EXPECT_EQ(sched.get().load().num_running, 0);
  sched.get().Resume();
  sched.run();
  EXPECT_EQ(sched.num_ends(2), 1);
}

TEST(Pause, KeepPlansNothingAndLosesNothing) {
  Sched sched;
  sched.submit(Ask(1));
  sched.step();
  sched.get().Pause(PauseMode::kKeep);
  EXPECT_EQ(sched.plan(), nullptr);
  EXPECT_EQ(sched.get().load().num_running, 1);
  sched.get().Resume();
  sched.run();
  EXPECT_EQ(sched.output(1).size(), 4u);
}

}  // namespace
}  // namespace tokenspeed::testing
