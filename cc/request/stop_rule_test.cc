// SPDX-License-Identifier: MIT

#include "cc/request/stop_rule.h"

#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

const std::vector<int32_t> kEos = {2};

TEST(StopRule, EndsAtAnEosToken) {
  const StopRule rule{
      .max_new_tokens = 9, .min_new_tokens = 0, .ignore_eos = false, .stop_token_ids = {}};
  EXPECT_EQ(rule.Judge(2, 1, kEos), Finish::kStop);
  EXPECT_EQ(rule.Judge(3, 1, kEos), Finish::kNone);
}

TEST(StopRule, IgnoreEosKeepsTheStopTokensOfTheRequest) {
  const StopRule rule{
      .max_new_tokens = 9, .min_new_tokens = 0, .ignore_eos = true, .stop_token_ids = {5}};
  EXPECT_EQ(rule.Judge(2, 1, kEos), Finish::kNone);
  EXPECT_EQ(rule.Judge(5, 1, kEos), Finish::kStop);
}

TEST(StopRule, NothingStopsBeforeMinNewTokens) {
  const StopRule rule{
      .max_new_tokens = 9, .min_new_tokens = 3, .ignore_eos = false, .stop_token_ids = {5}};
  EXPECT_EQ(rule.Judge(5, 2, kEos), Finish::kNone);
  EXPECT_EQ(rule.Judge(5, 3, kEos), Finish::kStop);
}

TEST(StopRule, AStopTokenInTheLastPlaceIsAStopAndNotALength) {
  const StopRule rule{
      .max_new_tokens = 2, .min_new_tokens = 0, .ignore_eos = false, .stop_token_ids = {}};
  EXPECT_EQ(rule.Judge(2, 2, kEos), Finish::kStop);
  EXPECT_EQ(rule.Judge(3, 2, kEos), Finish::kLength);
}

}  // namespace
}  // namespace tokenspeed
