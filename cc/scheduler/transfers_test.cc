// SPDX-License-Identifier: MIT

#include <string>
#include <vector>

#include "cc/testing/sched.h"
#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

using Ints = std::vector<int32_t>;

std::shared_ptr<const Outcome> Settle(Sched& sched, const Transfer& transfer, bool ok,
                                      int32_t first_token = -1) {
  const auto outcome = sched.get().SettleTransfer(transfer.id, ok, first_token).value();
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
  Settle(sched, sched.get().TakeTransfers().at(0), false);
  sched.run();
  EXPECT_EQ(sched.output(3).size(), 2u);
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

TEST(Transfers, AnUnknownOneIsRefused) {
  Sched sched;
  const auto result = sched.get().SettleTransfer(5, true, -1);
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
  EXPECT_FALSE(sched.get().SettleTransfer(id, true, -1).ok());
  EXPECT_TRUE(sched.get().SettleTransfer(id, true, 7).ok());
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
