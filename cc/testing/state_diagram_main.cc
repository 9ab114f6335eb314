// SPDX-License-Identifier: MIT
//
// Prints the states of a request as a mermaid diagram, from the table that the compiler computed
// out of the transitions. docs/scheduler.md carries the output; state_diagram_test.py compares the
// two.

#include <cstdio>

#include "cc/request/transition_table.h"

int main() {
  using tokenspeed::kEventNames;
  using tokenspeed::kStateNames;
  using tokenspeed::kTransitions;
  std::puts("stateDiagram-v2");
  std::printf("    [*] --> %s\n", kStateNames[0].data());
  for (size_t state = 0; state < kStateNames.size(); ++state) {
    bool is_last = true;
    for (size_t event = 0; event < kEventNames.size(); ++event) {
      const int next = kTransitions[state][event];
      if (next == tokenspeed::kNoTransition) continue;
      is_last = false;
      std::printf("    %s --> %s: %s\n", kStateNames[state].data(),
                  kStateNames[static_cast<size_t>(next)].data(), kEventNames[event].data());
    }
    if (is_last) std::printf("    %s --> [*]\n", kStateNames[state].data());
  }
}
