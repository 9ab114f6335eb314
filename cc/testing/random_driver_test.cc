// SPDX-License-Identifier: MIT

#include "cc/testing/random_driver.h"

#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

// How many scenarios a run plays; more on request: TOKENSPEED_RANDOM_SCENARIOS=100000. For millions
// of steps there is //cc/testing:random_driver.
int NumScenarios() {
  const char* asked = std::getenv("TOKENSPEED_RANDOM_SCENARIOS");
  return asked == nullptr ? 600 : std::atoi(asked);
}

TEST(RandomDriver, EveryInvariantHoldsAfterEveryMove) {
  Report total;
  for (int seed = 0; seed < NumScenarios(); ++seed) {
    const Scenario scenario = RandomScenario(static_cast<uint64_t>(seed), 250);
    const Report report = Replay(scenario, Fault::kNone);
    if (report.failure) {
      const Scenario small = Shrink(scenario, Fault::kNone);
      FAIL() << "seed " << seed << ": " << *Replay(small, Fault::kNone).failure << "\n"
             << ToSource(small);
    }
    total.num_steps += report.num_steps;
    total.num_tokens += report.num_tokens;
    total.num_retractions += report.num_retractions;
    total.num_cached_tokens += report.num_cached_tokens;
    total.num_transfers += report.num_transfers;
    total.num_refusals += report.num_refusals;
    total.num_steps_behind_loads += report.num_steps_behind_loads;
    total.store.hit_tokens += report.store.hit_tokens;
    total.store.num_timeouts += report.store.num_timeouts;
    total.store.num_puts += report.store.num_puts;
  }
  // The walk must have been where it is interesting.
  EXPECT_GT(total.num_steps, NumScenarios() * 40);
  EXPECT_GT(total.num_tokens, NumScenarios() * 60);
  EXPECT_GT(total.num_retractions, NumScenarios() / 4);
  EXPECT_GT(total.num_cached_tokens, NumScenarios() * 40);
  EXPECT_GT(total.num_transfers, NumScenarios() * 4);
  EXPECT_GT(total.num_refusals, NumScenarios() * 10);
  EXPECT_GT(total.num_steps_behind_loads, NumScenarios() / 25);
  EXPECT_GT(total.store.hit_tokens, NumScenarios() / 20);
  EXPECT_GT(total.store.num_timeouts, NumScenarios() / 20);
  EXPECT_GT(total.store.num_puts, NumScenarios() / 20);
}

TEST(RandomDriver, TwoSchedulersMakeTheSamePlansForAHundredThousandSteps) {
  // One life, with a host tier and a pool that is short of blocks.
  const Report report = Replay(RandomScenario(43, 900'000), Fault::kNone);
  EXPECT_FALSE(report.failure) << *report.failure;
  EXPECT_GE(report.num_steps, 100'000);
  EXPECT_GT(report.num_retractions, 400);
  EXPECT_GT(report.num_transfers, 20'000);
}

TEST(RandomDriver, BytesOfAnyLengthAreAScenario) {
  const uint8_t bytes[40] = {1, 2, 3};
  for (size_t size = 0; size <= sizeof(bytes); ++size) {
    EXPECT_FALSE(Replay(ScenarioFromBytes(bytes, size), Fault::kNone).failure);
  }
}

// A bug of each kind is planted; the driver must see it, and shrink its trace to what it takes.
struct Planted {
  const char* name;
  Fault fault;
  const char* failure;
  size_t most_moves;
};

class PlantedBug : public ::testing::TestWithParam<Planted> {};

TEST_P(PlantedBug, IsFoundAndShrunkToAFewMoves) {
  const Planted& planted = GetParam();
  int num_found = 0;
  for (uint64_t seed = 0; seed < 200 && num_found < 3; ++seed) {
    const Scenario scenario = RandomScenario(seed, 400);
    const Report report = Replay(scenario, planted.fault);
    if (!report.failure || report.failure->find(planted.failure) == std::string::npos) continue;
    ++num_found;
    const Scenario small = Shrink(scenario, planted.fault);
    EXPECT_LE(small.moves.size(), planted.most_moves) << ToSource(small);
    const auto failure = Replay(small, planted.fault).failure;
    ASSERT_TRUE(failure.has_value());
    EXPECT_NE(failure->find(planted.failure), std::string::npos) << *failure;
    EXPECT_FALSE(Replay(small, Fault::kNone).failure);
  }
  EXPECT_EQ(num_found, 3);
}

INSTANTIATE_TEST_SUITE_P(
    RandomDriver, PlantedBug,
    ::testing::Values(
        Planted{"LostCopies", Fault::kForgetsCopies, "a row reads what is not its prefix", 12},
        Planted{"HitsTooEarly", Fault::kPublishesTooEarly, "a hit is on what has not settled", 12},
        Planted{"MirrorToldLess", Fault::kMirrorMissesAborts, "same events, same plans", 4},
        Planted{"LostUpdates", Fault::kForgetsTableUpdates, "a delta is missing", 8}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tokenspeed::testing
