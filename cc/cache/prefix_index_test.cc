// SPDX-License-Identifier: MIT

#include "cc/cache/prefix_index.h"

#include <utility>
#include <vector>

#include "cc/base/hash.h"
#include "cc/base/status.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

constexpr Identity kMe{0, 0, 0};
using Tokens = std::vector<int32_t>;

class PrefixIndexTest : public ::testing::Test {
 protected:
  // Publishes a chain of full blocks (2 tokens each) and returns its nodes.
  std::vector<BlockId> Store(const std::vector<Tokens>& blocks, const Identity& identity) {
    PathPin tip;
    uint64_t hash = identity.RootHash();
    std::vector<BlockId> path;
    for (const Tokens& tokens : blocks) {
      hash = HashTokens(hash, tokens);
      BlockRef block = pool.Take();
      index.Publish(tip, identity, block, hash, tokens);
      path.push_back(tip.node());
    }
    index.Check();
    return path;
  }
  BlockId Find(BlockId parent, uint64_t parent_hash, const Tokens& tokens,
               const Identity& identity) {
    return index.FindChild(parent, identity, HashTokens(parent_hash, tokens), tokens);
  }

  BlockPool pool{9};
  PrefixIndex index{9, 2};
  TailHit FindTail(const Tokens& tokens) {
    return index.FindTail({}, kMe, tokens, [](BlockId, int32_t) { return true; });
  }
};

TEST_F(PrefixIndexTest, FindsAPublishedBlockUnderItsParentOnly) {
  const auto path = Store({{1, 2}, {3, 4}}, kMe);
  const uint64_t first = HashTokens(kMe.RootHash(), Tokens{1, 2});
  EXPECT_EQ(Find({}, kMe.RootHash(), {1, 2}, kMe), path[0]);
  EXPECT_EQ(Find(path[0], first, {3, 4}, kMe), path[1]);
  EXPECT_FALSE(Find({}, kMe.RootHash(), {3, 4}, kMe).valid());
}

TEST_F(PrefixIndexTest, DifferentIdentitiesNeverShare) {
  Store({{1, 2}}, kMe);
  for (const Identity& other : {Identity{1, 0, 0}, Identity{0, 1, 0}, Identity{0, 0, 1}}) {
    EXPECT_FALSE(Find({}, other.RootHash(), {1, 2}, other).valid());
    // Not even when the hashes collide.
    EXPECT_FALSE(
        index.FindChild({}, other, HashTokens(kMe.RootHash(), Tokens{1, 2}), Tokens{1, 2}).valid());
  }
}

TEST_F(PrefixIndexTest, ACollidingHashIsAMiss) {
  Store({{1, 2}}, kMe);
  EXPECT_FALSE(
      index.FindChild({}, kMe, HashTokens(kMe.RootHash(), Tokens{1, 2}), Tokens{9, 9}).valid());
}

TEST_F(PrefixIndexTest, AnEqualBlockStaysWithItsPublisher) {
  const auto path = Store({{1, 2}}, kMe);
  PathPin tip;
  BlockRef twin = pool.Take();
  EXPECT_FALSE(
      index.Publish(tip, kMe, twin, HashTokens(kMe.RootHash(), Tokens{1, 2}), Tokens{1, 2}));
  EXPECT_TRUE(twin);
  EXPECT_EQ(tip.node(), path[0]);
}

TEST_F(PrefixIndexTest, APinKeepsTheWholePath) {
  const auto path = Store({{1, 2}, {3, 4}, {5, 6}}, kMe);
  PathPin pin = index.Pin(path[1]);
  EXPECT_EQ(index.num_idle(), 1);
  EXPECT_EQ(index.EvictOldest().id(), path[2]);
  EXPECT_FALSE(index.EvictOldest());
  index.Check();
}

TEST_F(PrefixIndexTest, EvictsLeavesFirstAndTheLeastRecentlyUsedPathBeforeOthers) {
  const auto old_path = Store({{1, 2}, {3, 4}}, kMe);
  const auto new_path = Store({{7, 8}, {9, 9}}, kMe);
  {
    PathPin used = index.Pin(old_path[1]);
  }
  EXPECT_EQ(index.EvictOldest().id(), new_path[1]);
  EXPECT_EQ(index.EvictOldest().id(), new_path[0]);
  EXPECT_EQ(index.EvictOldest().id(), old_path[1]);
  EXPECT_EQ(index.EvictOldest().id(), old_path[0]);
  EXPECT_EQ(index.num_cached(), 0);
}

TEST_F(PrefixIndexTest, AUseOfAChildCountsForItsParentAfterTheChildIsGone) {
  const auto a = Store({{1, 2}, {3, 4}}, kMe);
  const auto b = Store({{7, 8}}, kMe);
  {
    PathPin used = index.Pin(a[1]);
  }
  index.EvictOldest();  // b, the older use
  EXPECT_FALSE(index.Contains(b[0]));
  EXPECT_EQ(index.EvictOldest().id(), a[1]);
  EXPECT_EQ(index.EvictOldest().id(), a[0]);
}

TEST_F(PrefixIndexTest, APartialTailIsFoundByItsLongestCommonRun) {
  index.PublishTail({}, kMe, pool.Take(), Tokens{4}, true);
  const TailHit hit = FindTail(Tokens{4, 5});
  EXPECT_EQ(hit.num_tokens, 1);
  EXPECT_EQ(FindTail(Tokens{5, 4}).num_tokens, 0);
}

TEST_F(PrefixIndexTest, AFullBlockServesAPartialHitToo) {
  const auto path = Store({{1, 2}}, kMe);
  const TailHit hit = FindTail(Tokens{1, 9});
  EXPECT_EQ(hit.node, path[0]);
  EXPECT_EQ(hit.num_tokens, 1);
}

TEST_F(PrefixIndexTest, ATailThatIsCoveredAlreadyIsNotKept) {
  Store({{1, 2}}, kMe);
  EXPECT_FALSE(index.PublishTail({}, kMe, pool.Take(), Tokens{1}, true).valid());
  EXPECT_EQ(index.num_cached(), 1);
  EXPECT_EQ(pool.num_free(), 7);
}

TEST_F(PrefixIndexTest, ATailThatMustStandForItselfIsKeptOnce) {
  Store({{1, 2}}, kMe);
  const BlockId tail = index.PublishTail({}, kMe, pool.Take(), Tokens{1}, false);
  EXPECT_TRUE(tail.valid());
  EXPECT_EQ(index.PublishTail({}, kMe, pool.Take(), Tokens{1}, false), tail);
  EXPECT_EQ(index.num_cached(), 2);
  EXPECT_EQ(pool.num_free(), 6);
}

TEST_F(PrefixIndexTest, ATailThatDoesNotSuitIsPassedOver) {
  index.PublishTail({}, kMe, pool.Take(), Tokens{4}, true);
  const auto never = [](BlockId, int32_t) { return false; };
  EXPECT_FALSE(index.FindTail({}, kMe, Tokens{4, 5}, never).node.valid());
}

TEST_F(PrefixIndexTest, ACursorIsStaleOnceItsBlockLeft) {
  const auto path = Store({{1, 2}}, kMe);
  const PrefixCursor cursor = index.CursorAt(path[0], 1);
  EXPECT_TRUE(index.IsFresh(cursor));
  index.EvictOldest();
  EXPECT_FALSE(index.IsFresh(cursor));
  Store({{5, 6}}, kMe);  // the same block number with another content
  EXPECT_FALSE(index.IsFresh(cursor));
}

TEST_F(PrefixIndexTest, TellsParentsBeforeChildrenAndLeavesBeforeParents) {
  index.events().Enable();
  Store({{1, 2}, {3, 4}}, kMe);
  const uint64_t h0 = HashTokens(kMe.RootHash(), Tokens{1, 2});
  const uint64_t h1 = HashTokens(h0, Tokens{3, 4});
  index.EvictOldest();
  index.EvictOldest();
  const auto events = index.events().Take();
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(std::get<BlockStored>(events[0]).hash, h0);
  EXPECT_FALSE(std::get<BlockStored>(events[0]).has_parent);
  EXPECT_EQ(std::get<BlockStored>(events[1]).parent_hash, h0);
  EXPECT_EQ(std::get<BlockStored>(events[1]).token_ids, (Tokens{3, 4}));
  EXPECT_EQ(std::get<BlockRemoved>(events[2]).hash, h1);
  EXPECT_EQ(std::get<BlockRemoved>(events[3]).hash, h0);
}

TEST_F(PrefixIndexTest, ClearReturnsEveryBlockAndTellsItOnce) {
  index.events().Enable();
  Store({{1, 2}, {3, 4}}, kMe);
  index.Clear();
  EXPECT_EQ(pool.num_free(), 8);
  const auto events = index.events().Take();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<AllBlocksCleared>(events[0]));
}

TEST_F(PrefixIndexTest, ClearWhilePinnedIsABrokenInvariant) {
  const auto path = Store({{1, 2}}, kMe);
  PathPin pin = index.Pin(path[0]);
  EXPECT_THROW(index.Clear(), InvariantViolation);
}

}  // namespace
}  // namespace tokenspeed
