// SPDX-License-Identifier: MIT

#include "cc/cache/tier/store_health.h"

#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

TEST(StoreHealth, IsAskedFreelyWhileItAnswers) {
  StoreHealth health(100, 1000);
  EXPECT_TRUE(health.MayAsk(0, 7));
}

TEST(StoreHealth, IsLeftAloneAfterAFailureAndThenTriedByOne) {
  StoreHealth health(100, 1000);
  health.Failed(50);
  EXPECT_FALSE(health.MayAsk(149, 0));
  EXPECT_TRUE(health.MayAsk(150, 0));
  EXPECT_FALSE(health.MayAsk(150, 1));
  health.Succeeded();
  EXPECT_TRUE(health.MayAsk(150, 7));
}

TEST(StoreHealth, WaitsTwiceAsLongEachTimeUpToALimit) {
  StoreHealth health(100, 300);
  int64_t now_us = 0;
  for (const int64_t wait_us : {100, 200, 300, 300}) {
    health.Failed(now_us);
    EXPECT_FALSE(health.MayAsk(now_us + wait_us - 1, 0));
    EXPECT_TRUE(health.MayAsk(now_us + wait_us, 0));
    now_us += wait_us;
  }
}

TEST(StoreHealth, WhatFailsTogetherCountsOnce) {
  StoreHealth health(100, 1000);
  for (int i = 0; i < 8; ++i) health.Failed(0);
  EXPECT_TRUE(health.MayAsk(100, 0));
}

}  // namespace
}  // namespace tokenspeed
