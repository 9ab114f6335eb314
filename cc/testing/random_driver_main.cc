// SPDX-License-Identifier: MIT
//
// The random driver from the command line, for as many steps as one likes:
//   tools/bazel run //cc/testing:random_driver -- [--steps N] [--seed N] [--moves N]
// Plays scenarios of --moves moves, one seed after the other, until --steps steps were planned.
// Prints what happened; a failure is shrunk, printed as source, and the exit status is 1.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "cc/testing/random_driver.h"

namespace tokenspeed::testing {
namespace {

int Fail(uint64_t seed, const Scenario& scenario) {
  const Scenario small = Shrink(scenario, Fault::kNone);
  std::printf("seed %llu: %s\n%s\n", static_cast<unsigned long long>(seed),
              Replay(small, Fault::kNone).failure.value_or("it passes now").c_str(),
              ToSource(small).c_str());
  return 1;
}

int Drive(int64_t num_steps, uint64_t seed, int num_moves) {
  Report total;
  int64_t num_scenarios = 0;
  for (; total.num_steps < num_steps; ++seed, ++num_scenarios) {
    const Scenario scenario = RandomScenario(seed, num_moves);
    const Report report = Replay(scenario, Fault::kNone);
    if (report.failure) return Fail(seed, scenario);
    total.num_steps += report.num_steps;
    total.num_tokens += report.num_tokens;
    total.num_retractions += report.num_retractions;
    total.num_cached_tokens += report.num_cached_tokens;
    total.num_transfers += report.num_transfers;
    total.num_refusals += report.num_refusals;
  }
  std::printf(
      "%lld steps of %lld scenarios: %lld tokens, %lld cached, %lld retractions, "
      "%lld transfers, %lld refused calls\n",
      static_cast<long long>(total.num_steps), static_cast<long long>(num_scenarios),
      static_cast<long long>(total.num_tokens), static_cast<long long>(total.num_cached_tokens),
      static_cast<long long>(total.num_retractions), static_cast<long long>(total.num_transfers),
      static_cast<long long>(total.num_refusals));
  return 0;
}

}  // namespace
}  // namespace tokenspeed::testing

int main(int argc, char** argv) {
  std::map<std::string, long long> options = {
      {"--steps", 1'000'000}, {"--seed", 0}, {"--moves", 400}};
  for (int i = 1; i < argc; i += 2) {
    const auto option = options.find(argv[i]);
    char* end = nullptr;
    if (option == options.end() || i + 1 == argc) end = argv[i];
    if (end == nullptr) option->second = std::strtoll(argv[i + 1], &end, 10);
    if (*end != '\0' || end == argv[i]) {
      std::fprintf(stderr, "usage: random_driver [--steps N] [--seed N] [--moves N]\n");
      return 2;
    }
  }
  return tokenspeed::testing::Drive(options["--steps"], static_cast<uint64_t>(options["--seed"]),
                                    static_cast<int>(options["--moves"]));
}
