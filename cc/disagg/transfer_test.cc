// SPDX-License-Identifier: MIT

#include "cc/disagg/transfer.h"

#include <utility>

#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

Transfer Store() {
  return {.id = -1,
          .kind = TransferKind::kStore,
          .request_id = -1,
          .slot = -1,
          .first_token = 0,
          .num_tokens = 0,
          .groups = {0},
          .columns = {},
          .device_blocks = {1},
          .host_blocks = {2},
          .hashes = {},
          .parent_hashes = {},
          .token_ids = {},
          .target = -1,
          .deadline_us = -1};
}

TEST(TransferTable, TellsEachTransferOnceAndHoldsItUntilItIsTaken) {
  TransferTable table;
  const int64_t a = table.Start(Store(), {.kind = TransferKind::kStore});
  const int64_t b = table.Start(Store(), {.kind = TransferKind::kStore});
  EXPECT_NE(a, b);
  ASSERT_EQ(table.TakeFresh().size(), 2u);
  EXPECT_TRUE(table.TakeFresh().empty());
  EXPECT_NE(table.Find(a), nullptr);
  {
    const TransferTicket done = table.Take(a);
  }
  EXPECT_EQ(table.Find(a), nullptr);
  EXPECT_FALSE(table.empty());
}

TEST(TransferTicket, KeepsTheHostBlockItWritesUntilItDies) {
  HostTier tier(1, {{GroupKind::kFull, 1, 0, 0}});
  {
    TransferTicket ticket{.kind = TransferKind::kStore};
    ticket.host_targets.push_back(tier.Reserve(0));
    EXPECT_EQ(tier.num_free(), 0);
    EXPECT_EQ(tier.num_reserved(), 1);
  }
  EXPECT_EQ(tier.num_free(), 1);
}

}  // namespace
}  // namespace tokenspeed
