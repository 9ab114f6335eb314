// SPDX-License-Identifier: MIT
//
// The states of a request and the events that move it. A state is a move-only type that owns
// exactly what a request may own in that state; an event carries what the successor needs.
// `On(State&&, Event)` in transitions.h is the only way from one to the next, and a pair without a
// transition does not compile. A transition that takes the device residence away hands it back in a
// `Departure`: the caller puts it into the ticket of the last step in flight that uses it, or lets
// it go at once.

#pragma once

#include <type_traits>
#include <utility>
#include <variant>

#include "cc/cache/residence.h"
#include "cc/request/stop_rule.h"

namespace tokenspeed {

// Makes a state movable and not copyable, also where it owns nothing: a state can be consumed only
// once.
struct MoveOnly {
  MoveOnly() = default;
  MoveOnly(MoveOnly&&) = default;
  MoveOnly& operator=(MoveOnly&&) = default;
};

struct Submitted : MoveOnly {};  // queued; owns nothing
struct Prefetching : MoveOnly {  // queued; the store is asked for its prefix, until the deadline
  explicit Prefetching(int64_t d) : deadline_us(d) {}
  int64_t deadline_us;
};
struct Restoring : MoveOnly {  // part of its KV is on the way back from the host tier
  explicit Restoring(Residence r) : home(std::move(r)) {}
  Residence home;
};
struct RemotePrefilling : MoveOnly {  // its KV is computed by a prefill engine and on the way here
  explicit RemotePrefilling(Residence r) : home(std::move(r)) {}
  Residence home;
};
struct Prefilling : MoveOnly {  // part of its tokens is not yet in a step
  explicit Prefilling(Residence r) : home(std::move(r)) {}
  Residence home;
};
struct AwaitingFirstToken
    : MoveOnly {  // every known token is in a step; the next one has not settled
  explicit AwaitingFirstToken(Residence r) : home(std::move(r)) {}
  Residence home;
};
struct Decoding : MoveOnly {
  explicit Decoding(Residence r) : home(std::move(r)) {}
  Residence home;
};
struct Sending : MoveOnly {  // prefilled here; its decode engine is fetching the KV
  explicit Sending(Residence r) : home(std::move(r)) {}
  Residence home;
};
struct Retracted : MoveOnly {
};  // queued again with its tokens; blocks went back (or stay as cached prefix)
struct Finishing : MoveOnly {  // its end was told; a step in flight still carries a row of it
  explicit Finishing(Finish c) : cause(c) {}
  Finish cause;
};
struct Finished : MoveOnly {
  explicit Finished(Finish c) : cause(c) {}
  Finish cause;
};

using State = std::variant<Submitted, Prefetching, Restoring, RemotePrefilling, Prefilling,
                           AwaitingFirstToken, Decoding, Sending, Retracted, Finishing, Finished>;

namespace event {
struct Prefetch {  // the store may have more of its prefix
  int64_t deadline_us;
};
struct Prefetched {
};  // what the store had is in the host tier; or it had nothing, failed, was late
struct Admit {  // room was found: slot, shared prefix, private blocks
  Residence home;
};
struct Restore {  // as Admit, and blocks of the prefix are being loaded from the host tier
  Residence home;
};
struct LayersReady {};    // enough layers are loaded for a step to run behind the load
struct Restored {};       // all of it is here
struct RestoreFailed {};  // what was to be loaded has to be computed
struct Receive {          // as Admit, and a prefill engine fills the blocks
  Residence home;
};
struct Received {};
struct Send {};             // the first token settled on a prefill engine
struct Sent {};             // the decode engine has it all
struct PeerFailed {};       // the other engine of a remote transfer is gone or late
struct PromptScheduled {};  // the last chunk of the known tokens went into a step
struct TokenSettled {};     // a sampled token came back and the request goes on
struct Retract {};          // blocks ran out
struct Complete {           // a stop token or the length
  Finish cause;
};
struct Abort {};
struct Drained {};  // the last step in flight with a row of the request has settled
}  // namespace event

template <class Next>
struct [[nodiscard]] Departure {
  Next next;
  Residence residence;
};

}  // namespace tokenspeed
