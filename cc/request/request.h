// SPDX-License-Identifier: MIT
//
// One request: what was asked, its tokens, its state, and the numbers that a plan reads. The
// scheduler owns it from submit until its last row settled; nobody else sees it. Positions count
// tokens of the sequence: [0, settled) are in the cache for sure, [settled, scheduled) are written
// by steps in flight; up to `slack` of these may be drafts that are not kept.

#pragma once

#include <cstdint>
#include <utility>

#include "cc/base/ids.h"
#include "cc/base/status.h"
#include "cc/cache/prefix_index.h"
#include "cc/request/states.h"
#include "cc/request/stop_rule.h"
#include "cc/request/token_log.h"
#include "cc/request/transitions.h"

namespace tokenspeed {

// Steps stand for times: the engine knows when each step was launched.
struct RequestCounters {
  int64_t submitted_step = -1;     // the next step to be planned when it was submitted
  int64_t admitted_step = -1;      // first step with a row of it
  int64_t prefill_done_step = -1;  // step that took its last prompt token
  int64_t first_token_step = -1;   // step whose settling gave its first token
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;      // at its first admission: on the device, or loaded since
  int32_t host_tokens = 0;        // of these, loaded from the host tier,
  int32_t store_tokens = 0;       // where the store had brought them for this request
  int32_t completion_tokens = 0;  // emitted so far
  int32_t num_retractions = 0;
  int64_t num_retracted_steps = 0;  // steps it waited to come back
  int32_t num_delayed = 0;        // times it began to wait: no row in a step that prefilled others
  int32_t num_delayed_steps = 0;  // steps it waited so
  int32_t num_sampling_rows = 0;  // rows that sampled for it, to set beside completion_tokens
};

// Where a request stands in the queue. Ageing is a constant: a class of lower priority stands as if
// it had come `kAgeingSteps` steps later for each class, so an order once made holds and nobody
// starves.
struct QueueKey {
  int64_t due_step;
  int64_t sequence;
  auto operator<=>(const QueueKey&) const = default;
};

struct Request {
  Request(RequestId i, std::vector<int32_t> prompt, StopRule s)
      : id(i), log(std::move(prompt)), stop(std::move(s)) {}

  const RequestId id;
  TokenLog log;
  const StopRule stop;
  int64_t cache_salt = 0;
  int64_t adapter = 0;
  int32_t priority = 0;
  QueueKey key{};
  State state = Submitted();

  int32_t scheduled = 0;
  int32_t settled = 0;
  int32_t rows_in_flight = 0;
  int32_t samples_in_flight = 0;
  int32_t num_void_rows = 0;  // rows in flight that computed on a load that failed
  int32_t slack = 0;          // drafts in flight: `scheduled` may turn out to be less by as many
  // The recurrent state: how many tokens it covers as far as settled (-1: not known), in which of
  // the request's state blocks, and in which the next row finds it (-1: only the device knows).
  int32_t state_tokens = -1;
  int32_t state_column = 0;
  int32_t next_state_column = 0;
  int64_t transfer = -1;        // the one in flight for it
  StepId last_step;             // newest step with a row of it
  int64_t prompts_seen = 0;     // the work on prompts planned by its newest step that samples
  int64_t passed_by = 0;        // times a later request was admitted before it, by longer prefix
  int64_t retracted_step = -1;  // the next step to be planned when it was retracted last
  bool is_new_in_slot = false;  // has a slot, and had no row in it yet
  bool asked_store = false;     // or found it not worth asking
  int32_t first_fetched = 0;    // blocks [first_fetched, end_fetched) came from the store
  int32_t end_fetched = 0;
  bool is_delayed = false;  // could have decoded in the newest step and had no row
  uint64_t root = 0;        // hash of its identity, when it was last matched
  uint64_t claimed = 0;     // the block hash it is known to be computing; 0: none
  PrefixCursor hit;         // longest prefix found so far, while it waits
  RequestCounters counters;

  // Tokens of the sequence once everything in flight has settled.
  int32_t num_tokens_ahead() const { return log.size() + samples_in_flight; }
  int32_t num_output_ahead() const { return log.num_output() + samples_in_flight; }
};

// Consumes the state of `request`, which is `S`, with `e`. For transitions that keep the residence
// or own none.
template <class S, class E>
  requires Legal<S, E>
void Advance(Request& request, E e) {
  Check(std::holds_alternative<S>(request.state),
        "an event finds the request in a state it is for");
  request.state = On(std::get<S>(std::move(request.state)), std::move(e));
}

// The same where the request is in one of several states; each of them must have a transition for
// `E`.
template <class S, class... Others, class E>
void AdvanceAny(Request& request, E e) {
  if constexpr (sizeof...(Others) > 0) {
    if (!std::holds_alternative<S>(request.state)) {
      return AdvanceAny<Others...>(request, std::move(e));
    }
  }
  Advance<S>(request, std::move(e));
}

// The same for transitions after which the residence is the caller's to place.
template <class S, class... Others, class E>
  requires Legal<S, E>
Residence LeaveFrom(Request& request, E e) {
  if constexpr (sizeof...(Others) > 0) {
    if (!std::holds_alternative<S>(request.state)) {
      return LeaveFrom<Others...>(request, std::move(e));
    }
  }
  Check(std::holds_alternative<S>(request.state),
        "an event finds the request in a state it is for");
  auto [next, residence] = On(std::get<S>(std::move(request.state)), std::move(e));
  request.state = std::move(next);
  return std::move(residence);
}

// The residence of a state that has one, null otherwise.
inline Residence* HomeOf(State& state) {
  return std::visit(
      [](auto& s) -> Residence* {
        if constexpr (requires { s.home; }) {
          return &s.home;
        } else {
          return nullptr;
        }
      },
      state);
}

}  // namespace tokenspeed
