// SPDX-License-Identifier: MIT
//
// The transitions as data, computed by the compiler from the overloads of `On`: for every state and
// event the state that follows, or none. The table test compares it with the table spelled out; the
// diagram tool prints it. It cannot disagree with the code, because it is the code that answers.

#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "cc/request/transitions.h"

namespace tokenspeed {

inline constexpr std::array kStateNames = std::to_array<std::string_view>(
    {"Submitted", "Prefetching", "Restoring", "RemotePrefilling", "Prefilling",
     "AwaitingFirstToken", "Decoding", "Sending", "Retracted", "Finishing", "Finished"});
static_assert(kStateNames.size() == std::variant_size_v<State>);

using Events =
    std::tuple<event::Prefetch, event::Prefetched, event::Admit, event::Restore, event::LayersReady,
               event::Restored, event::RestoreFailed, event::Receive, event::Received,
               event::PromptScheduled, event::TokenSettled, event::Send, event::Sent,
               event::PeerFailed, event::Retract, event::Complete, event::Abort, event::Drained>;
inline constexpr std::array kEventNames = std::to_array<std::string_view>(
    {"Prefetch", "Prefetched", "Admit", "Restore", "LayersReady", "Restored", "RestoreFailed",
     "Receive", "Received", "PromptScheduled", "TokenSettled", "Send", "Sent", "PeerFailed",
     "Retract", "Complete", "Abort", "Drained"});
static_assert(kEventNames.size() == std::tuple_size_v<Events>);

inline constexpr int kNoTransition = -1;

namespace internal {

template <class T>
struct Successor {
  using type = T;
};
template <class T>
struct Successor<Departure<T>> {
  using type = T;
};

template <class S, size_t... I>
constexpr int IndexOf(std::index_sequence<I...>) {
  int index = kNoTransition;
  ((std::is_same_v<S, std::variant_alternative_t<I, State>> ? void(index = static_cast<int>(I))
                                                            : void()),
   ...);
  return index;
}

template <class S, class E>
constexpr int Next() {
  if constexpr (Legal<S, E>) {
    using Result = decltype(On(std::declval<S>(), std::declval<E>()));
    return IndexOf<typename Successor<Result>::type>(
        std::make_index_sequence<std::variant_size_v<State>>());
  } else {
    return kNoTransition;
  }
}

template <class S, size_t... E>
constexpr auto RowOf(std::index_sequence<E...>) {
  return std::array<int, sizeof...(E)>{Next<S, std::tuple_element_t<E, Events>>()...};
}

template <size_t... S>
constexpr auto TableOf(std::index_sequence<S...>) {
  return std::array{RowOf<std::variant_alternative_t<S, State>>(
      std::make_index_sequence<std::tuple_size_v<Events>>())...};
}

}  // namespace internal

// kTransitions[state][event]: index of the successor in `State`, or kNoTransition.
inline constexpr auto kTransitions =
    internal::TableOf(std::make_index_sequence<std::variant_size_v<State>>());

}  // namespace tokenspeed
