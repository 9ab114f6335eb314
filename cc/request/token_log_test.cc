// SPDX-License-Identifier: MIT

#include "cc/request/token_log.h"

#include <vector>

#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

TEST(TokenLog, CountsPromptAndOutputApart) {
  TokenLog log({1, 2, 3});
  log.Append(4);
  EXPECT_EQ(log.num_prompt(), 3);
  EXPECT_EQ(log.num_output(), 1);
  EXPECT_EQ(log.tokens(2, 2)[1], 4);
}

TEST(TokenLog, HashesOnlyFullBlocks) {
  TokenLog log({1, 2, 3, 4, 5});
  EXPECT_EQ(log.Hashes(7, 2).size(), 2u);
  log.Append(6);
  EXPECT_EQ(log.Hashes(7, 2).size(), 3u);
}

TEST(TokenLog, AppendedTokensExtendTheChainThatAWholePromptWouldHave) {
  TokenLog grown({1, 2, 3});
  (void)grown.Hashes(7, 2);
  for (int32_t token : {4, 5, 6}) grown.Append(token);
  TokenLog whole({1, 2, 3, 4, 5, 6});
  const auto a = grown.Hashes(7, 2);
  const auto b = whole.Hashes(7, 2);
  EXPECT_EQ(std::vector(a.begin(), a.end()), std::vector(b.begin(), b.end()));
}

TEST(TokenLog, ANewRootStartsTheChainAgain) {
  TokenLog log({1, 2});
  const uint64_t first = log.Hashes(7, 2)[0];
  EXPECT_NE(log.Hashes(8, 2)[0], first);
  EXPECT_EQ(log.Hashes(7, 2)[0], first);
}

}  // namespace
}  // namespace tokenspeed
