// SPDX-License-Identifier: MIT
//
// Every legal transition, one function each. There is no other code that makes one state from
// another, and no handler for the rest: `Legal<State, Event>` is false and a call does not compile.
// transitions_test.cc spells the whole table; the diagram in docs/scheduler.md is printed from it.

#pragma once

#include <utility>

#include "cc/request/states.h"

namespace tokenspeed {

inline Prefetching On(Submitted&&, event::Prefetch e) { return Prefetching(e.deadline_us); }
inline Submitted On(Prefetching&&, event::Prefetched) { return {}; }
inline Finished On(Prefetching&&, event::Abort) { return Finished(Finish::kAbort); }

inline Prefilling On(Submitted&&, event::Admit e) { return Prefilling(std::move(e.home)); }
inline Prefilling On(Retracted&&, event::Admit e) { return Prefilling(std::move(e.home)); }

inline Restoring On(Submitted&&, event::Restore e) { return Restoring(std::move(e.home)); }
inline Restoring On(Retracted&&, event::Restore e) { return Restoring(std::move(e.home)); }
inline Prefilling On(Restoring&& s, event::LayersReady) { return Prefilling(std::move(s.home)); }
inline Prefilling On(Restoring&& s, event::Restored) { return Prefilling(std::move(s.home)); }
inline Departure<Retracted> On(Restoring&& s, event::RestoreFailed) {
  return {{}, std::move(s.home)};
}

// Its rows were launched behind the load and computed on rubbish: it starts again.
inline Departure<Retracted> On(Prefilling&& s, event::RestoreFailed) {
  return {{}, std::move(s.home)};
}
inline Departure<Retracted> On(AwaitingFirstToken&& s, event::RestoreFailed) {
  return {{}, std::move(s.home)};
}

inline RemotePrefilling On(Submitted&&, event::Receive e) {
  return RemotePrefilling(std::move(e.home));
}
inline AwaitingFirstToken On(RemotePrefilling&& s, event::Received) {
  return AwaitingFirstToken(std::move(s.home));
}
inline Departure<Finishing> On(RemotePrefilling&& s, event::PeerFailed) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}
inline Sending On(AwaitingFirstToken&& s, event::Send) { return Sending(std::move(s.home)); }
inline Departure<Finishing> On(Sending&& s, event::Sent) {
  return {Finishing(Finish::kLength), std::move(s.home)};
}
inline Departure<Finishing> On(Sending&& s, event::PeerFailed) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}

inline AwaitingFirstToken On(Prefilling&& s, event::PromptScheduled) {
  return AwaitingFirstToken(std::move(s.home));
}

inline Decoding On(AwaitingFirstToken&& s, event::TokenSettled) {
  return Decoding(std::move(s.home));
}
inline Decoding On(Decoding&& s, event::TokenSettled) { return std::move(s); }
// The step was launched before the request was retracted; its token is kept and resumed from.
inline Retracted On(Retracted&& s, event::TokenSettled) { return std::move(s); }

inline Departure<Retracted> On(Prefilling&& s, event::Retract) { return {{}, std::move(s.home)}; }
inline Departure<Retracted> On(AwaitingFirstToken&& s, event::Retract) {
  return {{}, std::move(s.home)};
}
inline Departure<Retracted> On(Decoding&& s, event::Retract) { return {{}, std::move(s.home)}; }

inline Departure<Finishing> On(AwaitingFirstToken&& s, event::Complete e) {
  return {Finishing(e.cause), std::move(s.home)};
}
inline Departure<Finishing> On(Decoding&& s, event::Complete e) {
  return {Finishing(e.cause), std::move(s.home)};
}
inline Finishing On(Retracted&&, event::Complete e) { return Finishing(e.cause); }

inline Finished On(Submitted&&, event::Abort) { return Finished(Finish::kAbort); }
inline Departure<Finishing> On(Prefilling&& s, event::Abort) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}
inline Departure<Finishing> On(AwaitingFirstToken&& s, event::Abort) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}
inline Departure<Finishing> On(Decoding&& s, event::Abort) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}
inline Departure<Finishing> On(Restoring&& s, event::Abort) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}
inline Departure<Finishing> On(RemotePrefilling&& s, event::Abort) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}
inline Departure<Finishing> On(Sending&& s, event::Abort) {
  return {Finishing(Finish::kAbort), std::move(s.home)};
}
inline Finishing On(Retracted&&, event::Abort) { return Finishing(Finish::kAbort); }

inline Finished On(Finishing&& s, event::Drained) { return Finished(s.cause); }

// Whether a transition exists for the pair.
template <class S, class E>
concept Legal = requires(S s, E e) { On(std::move(s), std::move(e)); };

}  // namespace tokenspeed
