// SPDX-License-Identifier: MIT
//
// Rows of the request table. `SlotRef` is move-only; the row is free again when it dies, which is
// after the last step in flight that uses the row, because that step's ticket holds the
// `Residence`. The lowest free row is taken first, so that live rows stay dense. Scheduler's thread
// only.

#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "cc/base/ids.h"

namespace tokenspeed {

class SlotPool;

class SlotRef {
 public:
  SlotRef() = default;
  SlotRef(SlotRef&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, SlotId())) {}
  SlotRef& operator=(SlotRef&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(id_, other.id_);
    return *this;
  }
  SlotRef(const SlotRef&) = delete;
  SlotRef& operator=(const SlotRef&) = delete;
  inline ~SlotRef();

  explicit operator bool() const { return pool_ != nullptr; }
  SlotId id() const { return id_; }

 private:
  friend class SlotPool;
  SlotRef(SlotPool* pool, SlotId id) : pool_(pool), id_(id) {}
  SlotPool* pool_ = nullptr;
  SlotId id_;
};

class SlotPool {
 public:
  explicit SlotPool(int32_t num_slots) : num_slots_(num_slots) {
    for (int32_t id = 0; id < num_slots; ++id) free_.emplace(id);
  }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  SlotRef Take() {
    if (free_.empty()) return {};
    const SlotId id = free_.top();
    free_.pop();
    return SlotRef(this, id);
  }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_slots() const { return num_slots_; }

 private:
  friend class SlotRef;
  int32_t num_slots_;
  std::priority_queue<SlotId, std::vector<SlotId>, std::greater<>> free_;
};

SlotRef::~SlotRef() {
  if (pool_ != nullptr) pool_->free_.push(id_);
}

}  // namespace tokenspeed
