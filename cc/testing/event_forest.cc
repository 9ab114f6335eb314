// SPDX-License-Identifier: MIT

#include "cc/testing/event_forest.h"

#include <stdexcept>
#include <variant>

namespace tokenspeed::testing {
namespace {

void Require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

}  // namespace

void EventForest::Apply(const std::vector<KvEvent>& events) {
  for (const KvEvent& event : events) {
    if (const auto* stored = std::get_if<BlockStored>(&event)) Store(*stored);
    if (const auto* removed = std::get_if<BlockRemoved>(&event)) Remove(*removed);
    if (std::holds_alternative<AllBlocksCleared>(event)) {
      device_.clear();
      host_.clear();
    }
  }
}

void EventForest::Store(const BlockStored& event) {
  if (event.medium == Medium::kHost) {
    Require(host_.insert(event.hash).second, "a host block is stored once");
    return;
  }
  if (event.has_parent) {
    const auto parent = device_.find(event.parent_hash);
    Require(parent != device_.end(), "a parent is stored before its child");
    ++parent->second.num_children;
  }
  const uint64_t parent = event.has_parent ? event.parent_hash : event.hash;
  Require(device_.emplace(event.hash, Entry{parent, 0}).second, "a block is stored once");
}

void EventForest::Remove(const BlockRemoved& event) {
  if (event.medium == Medium::kHost) {
    Require(host_.erase(event.hash) == 1, "a host block that is removed was stored");
    return;
  }
  const auto entry = device_.find(event.hash);
  Require(entry != device_.end(), "a block that is removed was stored");
  Require(entry->second.num_children == 0, "a leaf is removed before its parent");
  const uint64_t parent = entry->second.parent;
  device_.erase(entry);
  if (parent != event.hash) --device_.at(parent).num_children;
}

}  // namespace tokenspeed::testing
