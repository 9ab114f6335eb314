// SPDX-License-Identifier: MIT

#include <type_traits>
#include <utility>
#include <vector>

#include "cc/cache/block_pool.h"
#include "cc/cache/block_tables.h"
#include "cc/cache/evict_order.h"
#include "cc/cache/slot_pool.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

TEST(BlockPool, NeverHandsOutBlockZero) {
  BlockPool pool(3);
  BlockRef a = pool.Take();
  BlockRef b = pool.Take();
  EXPECT_EQ(a.id(), BlockId(1));
  EXPECT_EQ(b.id(), BlockId(2));
  EXPECT_FALSE(pool.Take());
  EXPECT_EQ(pool.num_total(), 2);
}

TEST(BlockRef, ReturnsItsBlockWhenItDies) {
  BlockPool pool(3);
  {
    BlockRef block = pool.Take();
    EXPECT_EQ(pool.num_free(), 1);
  }
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(BlockRef, HasOneOwner) {
  static_assert(!std::is_copy_constructible_v<BlockRef> && !std::is_copy_assignable_v<BlockRef>);
  BlockPool pool(3);
  BlockRef a = pool.Take();
  BlockRef b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): that it is empty is the point
  EXPECT_TRUE(b);
  EXPECT_EQ(pool.num_free(), 1);
}

TEST(BlockRef, AssignmentReturnsTheBlockThatItHeld) {
  BlockPool pool(3);
  BlockRef a = pool.Take();
  a = BlockRef();
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(BlockPool, HandsOutTheBlockThatCameBackLast) {
  BlockPool pool(5);
  BlockRef a = pool.Take();
  BlockRef b = pool.Take();
  const BlockId last = a.id();
  b = BlockRef();
  a = BlockRef();
  EXPECT_EQ(pool.Take().id(), last);
}

TEST(SlotPool, TakesTheLowestFreeRow) {
  SlotPool pool(3);
  SlotRef a = pool.Take();
  SlotRef b = pool.Take();
  EXPECT_EQ(b.id(), SlotId(1));
  a = SlotRef();
  EXPECT_EQ(pool.Take().id(), SlotId(0));
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(SlotPool, IsEmptyWhenEveryRowIsTaken) {
  SlotPool pool(1);
  SlotRef a = pool.Take();
  EXPECT_FALSE(pool.Take());
}

TEST(BlockTables, RecordsEveryWriteOnceInOrder) {
  BlockTables tables(2, 3);
  tables.Set(SlotId(1), 0, BlockId(7));
  tables.Set(SlotId(1), 1, BlockId(8));
  EXPECT_EQ(tables.At(SlotId(1), 1), 8);
  EXPECT_EQ(tables.At(SlotId(0), 1), 0);
  const std::vector<TableUpdate> updates = tables.TakeUpdates();
  ASSERT_EQ(updates.size(), 2u);
  EXPECT_EQ(updates[1].block, 8);
  EXPECT_TRUE(tables.TakeUpdates().empty());
}

TEST(EvictOrder, YieldsLeastRecentUseFirstAndLowerNumberOnATie) {
  EvictOrder<BlockId> order(8);
  order.Add(BlockId(5), 10);
  order.Add(BlockId(3), 10);
  order.Add(BlockId(7), 4);
  std::vector<int32_t> seen;
  while (!order.empty()) {
    seen.push_back(order.Oldest().value());
    order.Remove(order.Oldest());
  }
  EXPECT_EQ(seen, (std::vector<int32_t>{7, 3, 5}));
}

TEST(EvictOrder, RemovesFromTheMiddle) {
  EvictOrder<BlockId> order(64);
  for (int32_t i = 0; i < 64; ++i) order.Add(BlockId(i), static_cast<uint64_t>((i * 37) % 64));
  for (int32_t i = 0; i < 64; i += 2) order.Remove(BlockId(i));
  uint64_t last = 0;
  int count = 0;
  for (; !order.empty(); ++count) {
    const BlockId oldest = order.Oldest();
    const auto use = static_cast<uint64_t>((oldest.value() * 37) % 64);
    EXPECT_GE(use, last);
    EXPECT_EQ(oldest.value() % 2, 1);
    last = use;
    order.Remove(oldest);
  }
  EXPECT_EQ(count, 32);
}

}  // namespace
}  // namespace tokenspeed
