// SPDX-License-Identifier: MIT
//
// A sequence of kernel calls with their arguments, played back without the code that made them: of
// a decode step the callers' Python takes as long as several layers. Between Start and Stop every
// entry point that the same thread calls is added after it has run. Addresses are kept as they are:
// whoever plays a recording keeps alive what they point to, and writes a step's own numbers there.
// Used by one thread at a time.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_RECORDING_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_RECORDING_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace tokenspeed::cpu {

class Recording {
 public:
  // Adds this thread's calls to `recording` from now on. Throws while another one is in progress.
  static void Start(std::shared_ptr<Recording> recording) {
    if (InProgress() != nullptr) throw std::logic_error("a recording is in progress already");
    InProgress() = std::move(recording);
  }
  static void Stop() { InProgress() = nullptr; }

  static std::shared_ptr<Recording>& InProgress() {
    thread_local std::shared_ptr<Recording> recording;
    return recording;
  }

  void Add(std::function<void()> call) { calls_.push_back(std::move(call)); }

  // Throws what a call throws; later calls are not made then.
  void Play() const {
    for (const auto& call : calls_) call();
  }

  size_t size() const { return calls_.size(); }

 private:
  std::vector<std::function<void()>> calls_;
};

// An entry point that takes part in recordings. References are kept as copies.
template <auto kEntry>
struct Recorded;

template <class... Args, void (*kEntry)(Args...)>
struct Recorded<kEntry> {
  static void Call(Args... args) {
    kEntry(args...);
    if (const auto& recording = Recording::InProgress()) {
      recording->Add([args...] { kEntry(args...); });
    }
  }
};

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_RECORDING_H_
