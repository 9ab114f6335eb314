// SPDX-License-Identifier: MIT

#include "cc/cache/kv_cache.h"

#include <utility>
#include <vector>

#include "cc/base/hash.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

constexpr Identity kMe{0, 0, 0};

struct Sequence {
  explicit Sequence(std::vector<int32_t> t) : tokens(std::move(t)) {
    uint64_t hash = kMe.RootHash();
    for (size_t i = 0; i + 2 <= tokens.size(); i += 2) {
      hash = HashTokens(hash, std::span(tokens).subspan(i, 2));
      hashes.push_back(hash);
    }
  }
  Content content() const { return {tokens, hashes}; }
  std::vector<int32_t> tokens;
  std::vector<uint64_t> hashes;
};

class KvCacheTest : public ::testing::Test {
 protected:
  KvCache cache{{.num_blocks = 6,
                 .block_size = 2,
                 .num_slots = 2,
                 .max_blocks_per_seq = 5,
                 .enable_prefix_caching = true,
                 .groups = {{GroupKind::kFull, 1, 0, 0}}}};

  PrefixHit Match(const Sequence& sequence, int32_t limit) {
    const PrefixCursor path = cache.Extend({}, kMe, sequence.content(), limit);
    return {path, cache.FindTail(path, kMe, sequence.content(), limit)};
  }
  std::optional<MovedIn> MoveIn(const Sequence& sequence, int32_t num_spare) {
    const auto size = static_cast<int32_t>(sequence.tokens.size());
    return cache.MoveIn(Match(sequence, size - 1), kMe, size, num_spare);
  }
  void RunThrough(const Sequence& sequence) {
    auto moved_in = MoveIn(sequence, 0);
    cache.MoveOut(std::move(moved_in->residence), sequence.content(),
                  static_cast<int32_t>(sequence.tokens.size()));
  }
};

TEST_F(KvCacheTest, MovesInWithBlocksForEveryToken) {
  auto in = MoveIn(Sequence({1, 2, 3}), 0);
  ASSERT_TRUE(in);
  EXPECT_EQ(in->residence.num_blocks(), 2);
  EXPECT_EQ(in->num_cached_tokens, 0);
  EXPECT_EQ(cache.tables().At(in->residence.slot(), 0), in->residence.columns()[0].id().value());
}

TEST_F(KvCacheTest, AShortageChangesNothing) {
  EXPECT_FALSE(MoveIn(Sequence({1, 2, 3}), 4));
  EXPECT_EQ(cache.pool().num_free(), 5);
  EXPECT_EQ(cache.slots().num_free(), 2);
}

TEST_F(KvCacheTest, ASecondTurnFindsTheFullBlocksAndCopiesTheTail) {
  RunThrough(Sequence({1, 2, 3}));
  auto in = MoveIn(Sequence({1, 2, 3, 4, 5}), 0);
  ASSERT_TRUE(in);
  EXPECT_EQ(in->num_cached_tokens, 3);
  EXPECT_EQ(in->residence.num_published(), 1);
  ASSERT_EQ(in->copies.size(), 1u);
  EXPECT_NE(in->copies[0].from, in->copies[0].to);
  EXPECT_EQ(cache.tables().At(in->residence.slot(), 1), in->copies[0].to.value());
}

TEST_F(KvCacheTest, TheSourceOfACopyCannotBeEvictedBeforeItsPinIsDropped) {
  RunThrough(Sequence({1}));
  auto in = MoveIn(Sequence({1, 5}), 0);
  ASSERT_EQ(in->copies.size(), 1u);
  EXPECT_EQ(cache.num_available(), 3);
  in->copy_source = PathPin();
  EXPECT_EQ(cache.num_available(), 4);
}

TEST_F(KvCacheTest, TheLastTokenIsNeverTakenFromTheCache) {
  RunThrough(Sequence({1, 2}));
  auto in = MoveIn(Sequence({1, 2}), 0);
  EXPECT_EQ(in->num_cached_tokens, 1);  // by copy from the full block, which alone holds both
}

TEST_F(KvCacheTest, GrowEvictsIdleBlocksAndFailsWhenNoneIsLeft) {
  RunThrough(Sequence({1, 2, 3, 4}));
  auto in = MoveIn(Sequence({7, 8}), 0);
  EXPECT_TRUE(cache.Grow(in->residence, 10));
  EXPECT_EQ(cache.index().num_cached(), 0);
  EXPECT_FALSE(cache.Grow(in->residence, 11));
  EXPECT_EQ(in->residence.num_blocks(), 5);
}

TEST_F(KvCacheTest, OnlySettledBlocksArePublished) {
  const Sequence sequence({1, 2, 3, 4});
  auto in = MoveIn(sequence, 0);
  cache.Publish(in->residence, sequence.content(), 3);
  EXPECT_EQ(in->residence.num_published(), 1);
  EXPECT_EQ(cache.index().num_cached(), 1);
  EXPECT_EQ(cache.index().num_idle(), 0);
}

TEST_F(KvCacheTest, WhoStoppedPublishingReturnsItsBlocksUnshared) {
  const Sequence sequence({1, 2, 3, 4});
  auto in = MoveIn(sequence, 0);
  cache.StopPublishing(in->residence);
  cache.MoveOut(std::move(in->residence), sequence.content(), 4);
  EXPECT_EQ(cache.index().num_cached(), 0);
  EXPECT_EQ(cache.pool().num_free(), 5);
}

TEST_F(KvCacheTest, AStaleCursorStartsFromTheRoot) {
  const Sequence sequence({1, 2, 3, 4});
  RunThrough(sequence);
  const PrefixCursor deep = cache.Extend({}, kMe, sequence.content(), 4);
  EXPECT_EQ(deep.num_blocks, 2);
  cache.index().Clear();
  EXPECT_EQ(cache.Extend(deep, kMe, sequence.content(), 4).num_blocks, 0);
}

}  // namespace
}  // namespace tokenspeed
