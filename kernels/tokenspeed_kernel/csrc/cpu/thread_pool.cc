// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace tokenspeed::cpu {
namespace {

// About 50 us of spinning on current CPUs: longer than the gap between two kernels of a step,
// shorter than anything another process would notice.
constexpr int kSpinsBeforeSleep = 1500;
constexpr int kSpinsBeforeYield = 4000;
constexpr uint32_t kClosed = 0xffffffffu;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

int UsableCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

// `ticket` is (job number << 32 | next chunk). A worker claims a chunk by compare-and-swap on it,
// so a late worker cannot take a chunk of a job that it has not read. While a job's fields are
// written the ticket says kClosed under a number of its own: whoever read a new field fails to
// claim an old chunk.
struct ThreadPool::State {
  explicit State(int threads) : num_threads(threads) {}

  std::mutex mutex;  // held by the thread whose job is running
  std::vector<std::thread> workers;
  std::atomic<int> num_threads;
  std::atomic<bool> stopping{false};

  std::atomic<Body> body{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> count{0};
  std::atomic<int64_t> grain{1};

  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<uint32_t> num_done{0};
  alignas(64) std::atomic<uint32_t> wake{0};
  std::atomic<int> num_sleeping{0};

  void RunChunks(uint32_t job);
  void Work();
  void StartWorkers();
  void JoinWorkers();
};

void ThreadPool::State::RunChunks(uint32_t job) {
  uint64_t seen = ticket.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(seen >> 32) == job && static_cast<uint32_t>(seen) != kClosed) {
    const Body run = body.load(std::memory_order_acquire);
    void* const with = context.load(std::memory_order_acquire);
    const int64_t total = count.load(std::memory_order_acquire);
    const int64_t step = grain.load(std::memory_order_acquire);
    const int64_t begin = static_cast<int64_t>(static_cast<uint32_t>(seen)) * step;
    if (begin >= total) return;
    if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      continue;
    }
    run(with, begin, std::min(begin + step, total));
    num_done.fetch_add(1, std::memory_order_release);
    seen = ticket.load(std::memory_order_acquire);
  }
}

void ThreadPool::State::Work() {
  uint32_t last_job = 0;
  int spins = 0;
  while (!stopping.load(std::memory_order_acquire)) {
    const uint32_t seen_wake = wake.load(std::memory_order_acquire);
    const auto job = static_cast<uint32_t>(ticket.load(std::memory_order_acquire) >> 32);
    if (job != last_job) {
      RunChunks(job);
      last_job = job;
      spins = 0;
    } else if (++spins < kSpinsBeforeSleep) {
      Pause();
    } else {
      num_sleeping.fetch_add(1, std::memory_order_seq_cst);
      wake.wait(seen_wake, std::memory_order_acquire);
      num_sleeping.fetch_sub(1, std::memory_order_relaxed);
      spins = 0;
    }
  }
}

void ThreadPool::State::StartWorkers() {
  const int wanted = num_threads.load(std::memory_order_relaxed) - 1;
  while (static_cast<int>(workers.size()) < wanted) {
    workers.emplace_back([this] { Work(); });
  }
}

void ThreadPool::State::JoinWorkers() {
  stopping.store(true, std::memory_order_release);
  wake.fetch_add(1, std::memory_order_seq_cst);
  wake.notify_all();
  for (std::thread& worker : workers) worker.join();
  workers.clear();
  stopping.store(false, std::memory_order_release);
}

ThreadPool::ThreadPool() : state_(new State(UsableCpus())) {
  pthread_atfork(nullptr, nullptr, &ThreadPool::ResetInForkedChild);
}

ThreadPool& ThreadPool::Global() {
  // Never destroyed: a worker may outlive static destructors.
  static auto* const pool = new ThreadPool();
  return *pool;
}

void ThreadPool::ResetInForkedChild() {
  // The parent's workers do not exist here and its mutex may be held for ever: leave both behind.
  ThreadPool& pool = Global();
  pool.state_ = new State(pool.state_->num_threads.load(std::memory_order_relaxed));
}

void ThreadPool::SetNumThreads(int num_threads) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const int clamped = std::clamp(num_threads, 1, kMaxThreads);
  if (clamped == state_->num_threads.load(std::memory_order_relaxed)) return;
  state_->JoinWorkers();
  state_->num_threads.store(clamped, std::memory_order_relaxed);
}

int ThreadPool::num_threads() const { return state_->num_threads.load(std::memory_order_relaxed); }

void ThreadPool::Shutdown() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->JoinWorkers();
}

void ThreadPool::ParallelFor(int64_t count, int64_t grain, Body body, void* context) {
  if (count <= 0) return;
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex, std::defer_lock);
  if (count <= grain || num_threads() == 1 || !lock.try_lock()) {
    body(context, 0, count);
    return;
  }
  state.StartWorkers();
  const int64_t num_chunks = (count + grain - 1) / grain;
  const auto last = static_cast<uint32_t>(state.ticket.load(std::memory_order_relaxed) >> 32);
  const uint32_t job = last + 2;
  state.ticket.store(static_cast<uint64_t>(last + 1) << 32 | kClosed, std::memory_order_seq_cst);
  state.body.store(body, std::memory_order_release);
  state.context.store(context, std::memory_order_release);
  state.count.store(count, std::memory_order_release);
  state.grain.store(grain, std::memory_order_release);
  state.num_done.store(0, std::memory_order_relaxed);
  state.ticket.store(static_cast<uint64_t>(job) << 32, std::memory_order_seq_cst);
  state.wake.fetch_add(1, std::memory_order_seq_cst);
  if (state.num_sleeping.load(std::memory_order_seq_cst) > 0) state.wake.notify_all();

  state.RunChunks(job);
  int spins = 0;
  while (state.num_done.load(std::memory_order_acquire) != static_cast<uint32_t>(num_chunks)) {
    if (++spins < kSpinsBeforeYield) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
}

namespace {

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

struct Buffer {
  std::unique_ptr<void, FreeDeleter> memory;
  size_t bytes = 0;
};

thread_local std::array<Buffer, static_cast<size_t>(ScratchSlot::kCount)> scratch_buffers;

}  // namespace

void* Scratch(ScratchSlot slot, size_t bytes) {
  Buffer& buffer = scratch_buffers[static_cast<size_t>(slot)];
  if (buffer.bytes < bytes) {
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    buffer.memory.reset(std::aligned_alloc(64, rounded));
    if (!buffer.memory) throw std::bad_alloc();
    buffer.bytes = rounded;
  }
  return buffer.memory.get();
}

}  // namespace tokenspeed::cpu
