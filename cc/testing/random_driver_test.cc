// SPDX-License-Identifier: MIT

#include "cc/testing/random_driver.h"

#include <cstdlib>

#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

// How many scenarios a run plays; more on request: TOKENSPEED_RANDOM_SCENARIOS=100000.
int NumScenarios() {
  const char* asked = std::getenv("TOKENSPEED_RANDOM_SCENARIOS");
  return asked == nullptr ? 400 : std::atoi(asked);
}

TEST(RandomDriver, EveryInvariantHoldsAfterEveryMove) {
  int64_t steps = 0;
  int64_t retractions = 0;
  int64_t cached = 0;
  for (int seed = 0; seed < NumScenarios(); ++seed) {
    const Scenario scenario = RandomScenario(static_cast<uint64_t>(seed), 250);
    const Report report = Replay(scenario);
    steps += report.num_steps;
    retractions += report.num_retractions;
    cached += report.num_cached_tokens;
    if (report.failure) {
      const Scenario small = Shrink(scenario);
      FAIL() << "seed " << seed << ": " << *Replay(small).failure << "\n" << ToSource(small);
    }
  }
  // The walk must have been where it is interesting.
  EXPECT_GT(steps, NumScenarios() * 20);
  EXPECT_GT(retractions, 0);
  EXPECT_GT(cached, 0);
}

TEST(RandomDriver, TwoSchedulersMakeTheSamePlansForALongLife) {
  const Report report = Replay(RandomScenario(2024, 40'000));
  EXPECT_FALSE(report.failure) << *report.failure;
  EXPECT_GT(report.num_steps, 2'000);
}

TEST(RandomDriver, ShrinkKeepsAPassingScenarioPassing) {
  const Scenario scenario = RandomScenario(3, 5);
  EXPECT_FALSE(Replay(scenario).failure);
}

TEST(RandomDriver, BytesOfAnyLengthAreAScenario) {
  const uint8_t bytes[40] = {1, 2, 3};
  for (size_t size = 0; size <= sizeof(bytes); ++size) {
    EXPECT_FALSE(Replay(ScenarioFromBytes(bytes, size)).failure);
  }
}

}  // namespace
}  // namespace tokenspeed::testing
