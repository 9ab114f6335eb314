// SPDX-License-Identifier: MIT

#include "cc/cache/group.h"

#include <set>
#include <utility>
#include <vector>

#include "cc/base/status.h"
#include "cc/cache/block_pool.h"
#include "cc/cache/side_cache.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

TEST(GroupPool, SplitsAParentAndNumbersItsChildren) {
  BlockPool parents(3);
  GroupPool group(parents, 4);
  BlockRef a = group.Take();
  BlockRef b = group.Take();
  EXPECT_EQ(a.id(), BlockId(4));  // parent 1
  EXPECT_EQ(b.id(), BlockId(5));
  EXPECT_EQ(parents.num_free(), 1);
  EXPECT_EQ(group.num_free(), 2 + 4);
}

TEST(GroupPool, GivesAParentBackOnceAllItsChildrenAreFree) {
  BlockPool parents(3);
  GroupPool group(parents, 2);
  std::vector<BlockRef> all;
  for (int i = 0; i < 4; ++i) all.push_back(group.Take());
  EXPECT_FALSE(group.Take());
  all[1] = BlockRef();
  EXPECT_EQ(parents.num_free(), 0);
  all[0] = BlockRef();
  EXPECT_EQ(parents.num_free(), 1);
  EXPECT_TRUE(group.IsFree(BlockId(2)));
  EXPECT_FALSE(group.IsFree(all[2].id()));
}

TEST(GroupPool, FillsAParentInUseBeforeItSplitsAnother) {
  BlockPool parents(5);
  GroupPool group(parents, 2);
  std::vector<BlockRef> all;
  for (int i = 0; i < 4; ++i) all.push_back(group.Take());
  all[0] = BlockRef();
  EXPECT_EQ(group.Take().id(), BlockId(2));
  EXPECT_EQ(group.num_parents(), 2);
}

TEST(GroupPool, TwoGroupsShareOneMemoryAndNeverABlockOfIt) {
  BlockPool parents(9);
  GroupPool small(parents, 64);
  GroupPool large(parents, 3);
  std::vector<BlockRef> held;
  std::set<int32_t> by_small;
  for (int i = 0; i < 130; ++i) {
    held.push_back(small.Take());
    by_small.insert(held.back().id().value() / 64);
  }
  while (BlockRef block = large.Take()) {
    EXPECT_FALSE(by_small.contains(block.id().value() / 3));
    held.push_back(std::move(block));
  }
  EXPECT_EQ(small.num_parents() + large.num_parents(), 8);
  held.clear();
  EXPECT_EQ(parents.num_free(), 8);
}

TEST(CacheGroup, AWindowReadsFromTheBlockOfItsOldestToken) {
  const CacheGroup window{GroupKind::kWindow, 1, 8, 0};
  EXPECT_EQ(window.FirstLiveBlock(0, 4), 0);
  EXPECT_EQ(window.FirstLiveBlock(10, 4), 0);
  EXPECT_EQ(window.FirstLiveBlock(11, 4), 1);  // reads tokens 4..10
  EXPECT_EQ(window.FirstLiveBlock(15, 4), 2);
}

TEST(SideCache, EvictsTheLeastRecentlyUsedAndNeverWhatIsRead) {
  BlockPool pool(5);
  SideCache cache(10);
  cache.Attach(BlockId(7), pool.Take());
  cache.Attach(BlockId(8), pool.Take());
  {
    SidePin used = cache.Pin(BlockId(7));
  }
  SidePin pin = cache.Pin(BlockId(7));
  EXPECT_EQ(cache.num_idle(), 1);
  EXPECT_TRUE(cache.EvictOldest());
  EXPECT_FALSE(cache.Has(BlockId(8)));
  EXPECT_FALSE(cache.EvictOldest());
  EXPECT_THROW((void)cache.Drop(BlockId(7)), InvariantViolation);
}

TEST(SideCache, ANodeWithoutABlockDropsNothing) {
  SideCache cache(4);
  EXPECT_FALSE(cache.Drop(BlockId(2)));
}

}  // namespace
}  // namespace tokenspeed
