// SPDX-License-Identifier: MIT

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <type_traits>
#include <vector>

#include "cc/base/containers.h"
#include "cc/base/hash.h"
#include "cc/base/ids.h"
#include "cc/base/status.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

TEST(Id, DoesNotConvertToAnotherKindOfId) {
  static_assert(!std::is_convertible_v<BlockId, SlotId>);
  static_assert(!std::is_convertible_v<int32_t, BlockId>);
  EXPECT_LT(BlockId(1), BlockId(2));
  EXPECT_FALSE(BlockId().valid());
}

TEST(Status, CarriesTheReasonOfARefusal) {
  EXPECT_TRUE(Status::Ok().ok());
  EXPECT_EQ(Status::Invalid("token_ids is empty").reason(), "token_ids is empty");
}

TEST(Result, ReadingTheValueOfARefusalIsABrokenInvariant) {
  Result<int> refused(Status::Invalid("no"));
  EXPECT_THROW(refused.value(), InvariantViolation);
  EXPECT_EQ(Result<int>(3).value(), 3);
}

TEST(Check, NamesTheInvariant) {
  try {
    Check(false, "free + held + cached == total");
    FAIL() << "a broken invariant must throw";
  } catch (const InvariantViolation& violation) {
    EXPECT_STREQ(violation.what(), "free + held + cached == total");
  }
}

TEST(HashTokens, DependsOnEveryTokenItsPlaceTheLengthAndTheParent) {
  const std::vector<int32_t> base = {1, 2, 3, 4, 5};
  std::set<uint64_t> seen = {HashTokens(7, base), HashTokens(8, base)};
  for (size_t i = 0; i < base.size(); ++i) {
    auto changed = base;
    changed[i] += 1;
    seen.insert(HashTokens(7, changed));
    auto swapped = base;
    std::swap(swapped[i], swapped[(i + 1) % base.size()]);
    seen.insert(HashTokens(7, swapped));
  }
  seen.insert(HashTokens(7, std::span(base).first(4)));
  EXPECT_EQ(seen.size(), 2 + 2 * base.size() + 1);
}

TEST(HashTokens, IsTheSameOnEveryMachine) {
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  constexpr std::array<int32_t, 4> kTokens = {1, 2, 3, 4};
  static_assert(HashTokens(0, kTokens) == HashTokens(0, kTokens));
  EXPECT_EQ(HashTokens(0, tokens), HashTokens(0, kTokens));
}

TEST(HashTokens, HasNoCollisionAmongAMillionShortBlocks) {
  std::vector<uint64_t> hashes;
  for (int32_t a = 0; a < 1000; ++a) {
    for (int32_t b = 0; b < 1000; ++b) hashes.push_back(HashTokens(1, std::array{a, b}));
  }
  std::sort(hashes.begin(), hashes.end());
  EXPECT_EQ(std::adjacent_find(hashes.begin(), hashes.end()), hashes.end());
}

TEST(EraseFirst, KeepsTheOrderOfTheRest) {
  std::vector<int> values = {1, 2, 3, 2};
  EXPECT_TRUE(EraseFirst(values, 2));
  EXPECT_EQ(values, (std::vector<int>{1, 3, 2}));
  EXPECT_FALSE(EraseFirst(values, 9));
}

TEST(CeilDiv, RoundsUp) {
  EXPECT_EQ(CeilDiv(0, 4), 0);
  EXPECT_EQ(CeilDiv(4, 4), 1);
  EXPECT_EQ(CeilDiv(5, 4), 2);
}

}  // namespace
}  // namespace tokenspeed
