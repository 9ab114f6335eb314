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
                 .groups = {{GroupKind::kFull, 1, 0, 0}},
                 .num_state_columns = 1}};

  PrefixHit Match(const Sequence& sequence, int32_t limit) {
    const PrefixCursor path = cache.Extend({}, kMe, sequence.content(), limit);
    return {path, cache.FindTail(path, kMe, sequence.content(), limit)};
  }
  int32_t Cached(const Sequence& sequence) {
    const PrefixHit hit = Match(sequence, static_cast<int32_t>(sequence.tokens.size()) - 1);
    return hit.path.num_blocks * 2 + hit.tail.num_tokens;
  }
  std::optional<Residence> MoveIn(const Sequence& sequence, int32_t num_spare) {
    const auto size = static_cast<int32_t>(sequence.tokens.size());
    const Start start{Match(sequence, size - 1), Cached(sequence)};
    return cache.MoveIn(start, kMe, size, num_spare);
  }
  void RunThrough(const Sequence& sequence) {
    auto moved_in = MoveIn(sequence, 0);
    cache.MoveOut(std::move(*moved_in), sequence.content(),
                  static_cast<int32_t>(sequence.tokens.size()), {-1, 0});
  }
};

TEST_F(KvCacheTest, MovesInWithBlocksForEveryToken) {
  auto in = MoveIn(Sequence({1, 2, 3}), 0);
  ASSERT_TRUE(in);
  EXPECT_EQ(in->num_blocks(), 2);
  EXPECT_EQ(cache.tables().At(in->slot(), 0), in->columns()[0].id().value());
}

TEST_F(KvCacheTest, AShortageChangesNothing) {
  EXPECT_FALSE(MoveIn(Sequence({1, 2, 3}), 4));
  EXPECT_EQ(cache.pool().num_free(), 5);
  EXPECT_EQ(cache.slots().num_free(), 2);
}

TEST_F(KvCacheTest, ASecondTurnFindsTheFullBlocksAndCopiesTheTail) {
  RunThrough(Sequence({1, 2, 3}));
  EXPECT_EQ(Cached(Sequence({1, 2, 3, 4, 5})), 3);
  auto in = MoveIn(Sequence({1, 2, 3, 4, 5}), 0);
  ASSERT_TRUE(in);
  EXPECT_EQ(in->num_published(), 1);
  const StartCopies start = cache.TakeStartCopies(*in);
  ASSERT_EQ(start.copies.size(), 1u);
  EXPECT_NE(start.copies[0].from, start.copies[0].to);
  EXPECT_EQ(cache.tables().At(in->slot(), 1), start.copies[0].to.value());
}

TEST_F(KvCacheTest, TheSourceOfACopyCannotBeEvictedBeforeItsPinIsDropped) {
  RunThrough(Sequence({1}));
  auto in = MoveIn(Sequence({1, 5}), 0);
  StartCopies start = cache.TakeStartCopies(*in);
  ASSERT_EQ(start.copies.size(), 1u);
  EXPECT_EQ(cache.num_available(), 3);
  start.tail = PathPin();
  EXPECT_EQ(cache.num_available(), 4);
}

TEST_F(KvCacheTest, TheLastTokenIsNeverTakenFromTheCache) {
  RunThrough(Sequence({1, 2}));
  EXPECT_EQ(Cached(Sequence({1, 2})), 1);  // by copy from the full block, which alone holds both
}

TEST_F(KvCacheTest, GrowEvictsIdleBlocksAndFailsWhenNoneIsLeft) {
  RunThrough(Sequence({1, 2, 3, 4}));
  auto in = MoveIn(Sequence({7, 8}), 0);
  EXPECT_TRUE(cache.Grow(*in, 10));
  EXPECT_EQ(cache.index().num_cached(), 0);
  EXPECT_FALSE(cache.Grow(*in, 11));
  EXPECT_EQ(in->num_blocks(), 5);
}

TEST_F(KvCacheTest, OnlySettledBlocksArePublished) {
  const Sequence sequence({1, 2, 3, 4});
  auto in = MoveIn(sequence, 0);
  cache.Publish(*in, sequence.content(), 3);
  EXPECT_EQ(in->num_published(), 1);
  EXPECT_EQ(cache.index().num_cached(), 1);
  EXPECT_EQ(cache.index().num_idle(), 0);
}

TEST_F(KvCacheTest, WhoStoppedPublishingReturnsItsBlocksUnshared) {
  const Sequence sequence({1, 2, 3, 4});
  auto in = MoveIn(sequence, 0);
  cache.StopPublishing(*in);
  cache.MoveOut(std::move(*in), sequence.content(), 4, {-1, 0});
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
