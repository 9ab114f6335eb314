// SPDX-License-Identifier: MIT
//
// The random driver with moves from a fuzzer: clang's libFuzzer (bazel build --config=fuzz
// //cc/testing:scheduler_fuzz), or, without it, the bytes of the files named on the command line.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "cc/testing/random_driver.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tokenspeed::testing;
  const Scenario scenario = ScenarioFromBytes(data, size);
  const Report report = Replay(scenario, Fault::kNone);
  if (report.failure) {
    std::fprintf(stderr, "%s\n%s\n", report.failure->c_str(),
                 ToSource(Shrink(scenario, Fault::kNone)).c_str());
    std::abort();
  }
  return 0;
}

#ifndef TOKENSPEED_LIBFUZZER
int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", argv[i]);
      return 2;
    }
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  return 0;
}
#endif
