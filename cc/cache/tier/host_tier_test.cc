// SPDX-License-Identifier: MIT

#include "cc/cache/tier/host_tier.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

constexpr Identity kMe{0, 0, 0};

const std::vector<CacheGroup> kOne = {{GroupKind::kFull, 1, 0, 0}};
const std::vector<CacheGroup> kTwo = {{GroupKind::kFull, 1, 0, 0}, {GroupKind::kWindow, 2, 8, 0}};

HostKey Key(uint64_t hash, uint64_t parent) {
  return {kMe, hash, parent, {static_cast<int32_t>(hash)}, 0};
}
HostKey Key(uint64_t hash) { return Key(hash, kMe.RootHash()); }

HostId Find(const HostTier& tier, uint64_t hash, int32_t group = 0) {
  for (const uint64_t parent : {kMe.RootHash(), uint64_t{1}, uint64_t{2}}) {
    const std::vector<int32_t> tokens{static_cast<int32_t>(hash)};
    const HostId found = tier.Find({kMe, hash, parent, tokens, group});
    if (found.valid()) return found;
  }
  return {};
}

HostId Store(HostTier& tier, const HostKey& key) {
  (void)tier.Commit(tier.Reserve(key.group), key);
  tier.Check();
  return Find(tier, key.hash, key.group);
}
HostId Store(HostTier& tier, uint64_t hash) { return Store(tier, Key(hash)); }

TEST(HostTier, ZeroBlocksMeansOff) {
  HostTier tier(0, kOne);
  EXPECT_FALSE(tier.enabled());
  EXPECT_FALSE(tier.Reserve(0));
}

TEST(HostTier, AnEntryExistsOnlyOnceItsCopyIsCommitted) {
  HostTier tier(2, kOne);
  BlockRef block = tier.Reserve(0);
  EXPECT_FALSE(Find(tier, 7).valid());
  EXPECT_TRUE(tier.Commit(std::move(block), Key(7)));
  EXPECT_TRUE(Find(tier, 7).valid());
}

TEST(HostTier, AReservationThatIsNotCommittedIsFreeAgain) {
  HostTier tier(1, kOne);
  {
    BlockRef block = tier.Reserve(0);
  }
  EXPECT_EQ(tier.num_free(), 1);
}

TEST(HostTier, EvictsTheLeastRecentlyUsedAndNeverAPinnedEntry) {
  HostTier tier(2, kOne);
  const HostId first = Store(tier, 1);
  Store(tier, 2);
  {
    HostPin used = tier.Pin(first);
  }
  Store(tier, 3);
  EXPECT_TRUE(Find(tier, 1).valid());
  EXPECT_FALSE(Find(tier, 2).valid());
  HostPin a = tier.Pin(Find(tier, 1));
  HostPin b = tier.Pin(Find(tier, 3));
  EXPECT_FALSE(tier.Reserve(0));
}

TEST(HostTier, ProvesTokensParentAndIdentity) {
  HostTier tier(1, kOne);
  Store(tier, 7);
  const std::vector<int32_t> seven{7};
  const std::vector<int32_t> eight{8};
  const Identity other{1, 0, 0};
  EXPECT_TRUE(tier.Find({kMe, 7, kMe.RootHash(), seven, 0}).valid());
  EXPECT_FALSE(tier.Find({kMe, 7, kMe.RootHash(), eight, 0}).valid());
  EXPECT_FALSE(tier.Find({kMe, 7, 1, seven, 0}).valid());
  EXPECT_FALSE(tier.Find({other, 7, kMe.RootHash(), seven, 0}).valid());
  EXPECT_FALSE(tier.Find({kMe, 7, kMe.RootHash(), seven, 1}).valid());
}

TEST(HostTier, TheFirstCopyOfABlockIsKept) {
  HostTier tier(2, kOne);
  const HostId first = Store(tier, 7);
  Store(tier, 7);
  EXPECT_EQ(Find(tier, 7), first);
  EXPECT_EQ(tier.num_free(), 1);
}

TEST(HostTier, WhatIsReadIsNotDropped) {
  HostTier tier(1, kOne);
  const HostId block = Store(tier, 7);
  {
    HostPin pin = tier.Pin(block);
    tier.DropIfIdle(block);
    EXPECT_TRUE(Find(tier, 7).valid());
  }
  tier.DropIfIdle(block);
  EXPECT_EQ(tier.num_free(), 1);
}

TEST(HostTier, TellsWhatItKeepsAndWhatItLetsGo) {
  HostTier tier(1, kOne);
  tier.events().Enable();
  Store(tier, 1);
  Store(tier, 2);
  const auto events = tier.events().Take();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(std::get<BlockStored>(events[0]).medium, Medium::kHost);
  EXPECT_EQ(std::get<BlockRemoved>(events[1]).hash, 1u);
  EXPECT_EQ(std::get<BlockStored>(events[2]).hash, 2u);
}

TEST(HostTier, EvictsLeavesBeforeTheirParentsHoweverOldTheseAre) {
  HostTier tier(2, kOne);
  tier.events().Enable();
  Store(tier, Key(1));
  Store(tier, Key(2, 1));
  Store(tier, 7);
  EXPECT_TRUE(Find(tier, 1).valid());
  EXPECT_FALSE(Find(tier, 2).valid());
  Store(tier, 8);
  EXPECT_EQ(std::get<BlockRemoved>(tier.events().Take()[2]).hash, 2u);
}

TEST(HostTier, ABlockIsNotKeptWithoutTheOneBeforeIt) {
  HostTier tier(2, kOne);
  EXPECT_FALSE(tier.Commit(tier.Reserve(0), Key(2, 1)));
  EXPECT_EQ(tier.num_free(), 2);
}

TEST(HostTier, GroupsShareItsMemoryInBlocksOfTheirSize) {
  HostTier tier(2, kTwo);
  Store(tier, 1);
  HostKey side = Key(1);
  side.group = 1;
  const HostId window = Store(tier, side);
  EXPECT_NE(window, Find(tier, 1));
  EXPECT_EQ(tier.BlockOf(window).value(), 4);  // the first one of the second parent
  EXPECT_TRUE(tier.Contains(1, 1));
  EXPECT_EQ(tier.num_free(), 0);
  HostPin a = tier.Pin(window);
  HostPin b = tier.Pin(Find(tier, 1));
  EXPECT_FALSE(tier.Reserve(0));
  EXPECT_TRUE(tier.Reserve(1));  // the window's parent has room for one more
  tier.Check();
}

TEST(HostTier, ClearKeepsWhatIsRead) {
  HostTier tier(2, kOne);
  Store(tier, 1);
  HostPin pin = tier.Pin(Store(tier, 2));
  tier.Clear();
  EXPECT_EQ(tier.num_entries(), 1);
  tier.Check();
}

}  // namespace
}  // namespace tokenspeed
