// SPDX-License-Identifier: MIT
//
// Errors have an owner. `Status` and `Result<T>` carry the caller's faults: they are returned, name
// the field or the limit, and leave the state as it was. `Check` guards our own invariants: a
// broken one throws `InvariantViolation` with the invariant in words, and the process is expected
// to end. Nothing else is thrown by the control plane.

#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

namespace tokenspeed {

class [[nodiscard]] Status {
 public:
  static Status Ok() { return Status(); }
  static Status Invalid(std::string reason) { return Status(std::move(reason)); }
  bool ok() const { return ok_; }
  const std::string& reason() const { return reason_; }

 private:
  Status() = default;
  explicit Status(std::string reason) : ok_(false), reason_(std::move(reason)) {}
  bool ok_ = true;
  std::string reason_;
};

class InvariantViolation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Reads a value out of a Result only where ok() was seen; asking for the value of a refusal is our
// own bug.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : held_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  bool ok() const { return std::holds_alternative<T>(held_); }
  const Status& status() const { return std::get<Status>(held_); }
  T& value() {
    if (!ok())
      throw InvariantViolation("the value of a refused result was read: " + status().reason());
    return std::get<T>(held_);
  }

 private:
  std::variant<T, Status> held_;
};

inline void Check(bool holds, const char* invariant) {
  if (!holds) [[unlikely]]
    throw InvariantViolation(invariant);
}

}  // namespace tokenspeed
