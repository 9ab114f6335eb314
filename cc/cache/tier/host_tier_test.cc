// SPDX-License-Identifier: MIT

#include "cc/cache/tier/host_tier.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

constexpr Identity kMe{0, 0, 0};

HostKey Key(uint64_t hash) { return {kMe, hash, 0, {static_cast<int32_t>(hash)}}; }

BlockId Store(HostTier& tier, uint64_t hash) {
  BlockRef block = tier.Reserve();
  const BlockId id = block.id();
  tier.Commit(std::move(block), Key(hash));
  tier.Check();
  return id;
}

BlockId Find(const HostTier& tier, uint64_t hash) {
  return tier.Find(kMe, hash, 0, std::vector{static_cast<int32_t>(hash)});
}

TEST(HostTier, ZeroBlocksMeansOff) {
  HostTier tier(0);
  EXPECT_FALSE(tier.enabled());
  EXPECT_FALSE(tier.Reserve());
}

TEST(HostTier, AnEntryExistsOnlyOnceItsCopyIsCommitted) {
  HostTier tier(2);
  BlockRef block = tier.Reserve();
  EXPECT_FALSE(Find(tier, 7).valid());
  tier.Commit(std::move(block), Key(7));
  EXPECT_TRUE(Find(tier, 7).valid());
}

TEST(HostTier, AReservationThatIsNotCommittedIsFreeAgain) {
  HostTier tier(1);
  {
    BlockRef block = tier.Reserve();
  }
  EXPECT_EQ(tier.num_free(), 1);
}

TEST(HostTier, EvictsTheLeastRecentlyUsedAndNeverAPinnedEntry) {
  HostTier tier(2);
  const BlockId first = Store(tier, 1);
  Store(tier, 2);
  {
    HostPin used = tier.Pin(first);
  }
  Store(tier, 3);
  EXPECT_TRUE(Find(tier, 1).valid());
  EXPECT_FALSE(Find(tier, 2).valid());
  HostPin a = tier.Pin(Find(tier, 1));
  HostPin b = tier.Pin(Find(tier, 3));
  EXPECT_FALSE(tier.Reserve());
}

TEST(HostTier, ProvesTokensParentAndIdentity) {
  HostTier tier(1);
  Store(tier, 7);
  EXPECT_FALSE(tier.Find(kMe, 7, 0, std::vector{8}).valid());
  EXPECT_FALSE(tier.Find(kMe, 7, 1, std::vector{7}).valid());
  EXPECT_FALSE(tier.Find(Identity{1, 0, 0}, 7, 0, std::vector{7}).valid());
}

TEST(HostTier, TheFirstCopyOfABlockIsKept) {
  HostTier tier(2);
  const BlockId first = Store(tier, 7);
  Store(tier, 7);
  EXPECT_EQ(Find(tier, 7), first);
  EXPECT_EQ(tier.num_free(), 1);
}

TEST(HostTier, WhatIsReadIsNotDropped) {
  HostTier tier(1);
  const BlockId block = Store(tier, 7);
  {
    HostPin pin = tier.Pin(block);
    tier.DropIfIdle(block);
    EXPECT_TRUE(Find(tier, 7).valid());
  }
  tier.DropIfIdle(block);
  EXPECT_EQ(tier.num_free(), 1);
}

TEST(HostTier, TellsWhatItKeepsAndWhatItLetsGo) {
  HostTier tier(1);
  tier.events().Enable();
  Store(tier, 1);
  Store(tier, 2);
  const auto events = tier.events().Take();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(std::get<BlockStored>(events[0]).medium, Medium::kHost);
  EXPECT_EQ(std::get<BlockRemoved>(events[1]).hash, 1u);
  EXPECT_EQ(std::get<BlockStored>(events[2]).hash, 2u);
}

TEST(HostTier, ClearKeepsWhatIsRead) {
  HostTier tier(2);
  Store(tier, 1);
  HostPin pin = tier.Pin(Store(tier, 2));
  tier.Clear();
  EXPECT_EQ(tier.num_entries(), 1);
  tier.Check();
}

}  // namespace
}  // namespace tokenspeed
