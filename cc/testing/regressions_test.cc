// SPDX-License-Identifier: MIT
//
// What the random driver and the fuzzer have found, shrunk, each under the name of what was wrong.

#include "cc/testing/random_driver.h"
#include "gtest/gtest.h"

namespace tokenspeed::testing {
namespace {

void ExpectPasses(const Scenario& scenario) {
  const Report report = Replay(scenario, Fault::kNone);
  EXPECT_FALSE(report.failure) << *report.failure;
}

// While drafts were in flight nobody could decode, and prompts took the whole step.
TEST(Regression, PromptsKeepTheDecodeGapWhileDraftsAreInFlight) {
  ExpectPasses({{1, 0, 0, 57, 0, 0, 1},
                {{0, 0, 0}, {0, 0, 0}, {0, 9, 0}, {0, 0, 5}, {44, 0, 0}, {0, 0, 2}}});
}

}  // namespace
}  // namespace tokenspeed::testing
