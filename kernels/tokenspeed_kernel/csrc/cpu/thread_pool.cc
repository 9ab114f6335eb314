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
constexpr int kSpinsBeforeSleep = 6000;
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

// The chunks of a job are dealt out in as many contiguous regions as there are threads. A thread
// takes its own region from the front, which streams through memory, then helps with the others'.
//
// A region's ticket is (job number << 32 | next chunk). A chunk is claimed by compare-and-swap on
// it, so a late worker cannot take a chunk of a job that it has not read. While a job's fields are
// written all tickets say kClosed under a number of their own: whoever read a new field fails to
// claim an old chunk.
struct ThreadPool::State {
  explicit State(int threads) : num_threads(threads) {}

  struct alignas(64) Region {
    std::atomic<uint64_t> ticket{0};
  };

  std::mutex mutex;  // held by the thread whose job is running
  std::vector<std::thread> workers;
  std::vector<Region> regions;  // one a thread; the caller's is the first
  std::atomic<int> num_threads;
  std::atomic<bool> stopping{false};

  std::atomic<Body> body{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> count{0};
  std::atomic<int64_t> grain{1};

  alignas(64) std::atomic<uint32_t> job{0};
  alignas(64) std::atomic<uint32_t> num_done{0};
  alignas(64) std::atomic<uint32_t> wake{0};
  std::atomic<int> num_sleeping{0};

  void Publish(int64_t units, int64_t chunk_units, Body run, void* with);
  void RunRegion(uint32_t number, size_t region);
  void RunChunks(uint32_t number, size_t self);
  void Work(size_t self, uint32_t last_job);
  void StartWorkers();
  void JoinWorkers();
};

// The first chunk of a region.
inline int64_t RegionStart(int64_t num_chunks, size_t region, size_t num_regions) {
  return num_chunks * static_cast<int64_t>(region) / static_cast<int64_t>(num_regions);
}

void ThreadPool::State::Publish(int64_t units, int64_t chunk_units, Body run, void* with) {
  const int64_t num_chunks = (units + chunk_units - 1) / chunk_units;
  const uint32_t closed = job.load(std::memory_order_relaxed) + 1;
  for (Region& region : regions) {
    region.ticket.store(static_cast<uint64_t>(closed) << 32 | kClosed, std::memory_order_seq_cst);
  }
  body.store(run, std::memory_order_release);
  context.store(with, std::memory_order_release);
  count.store(units, std::memory_order_release);
  grain.store(chunk_units, std::memory_order_release);
  num_done.store(0, std::memory_order_relaxed);
  for (size_t i = 0; i < regions.size(); ++i) {
    const auto start = static_cast<uint64_t>(RegionStart(num_chunks, i, regions.size()));
    regions[i].ticket.store(static_cast<uint64_t>(closed + 1) << 32 | start,
                            std::memory_order_release);
  }
  job.store(closed + 1, std::memory_order_seq_cst);
  wake.fetch_add(1, std::memory_order_seq_cst);
  if (num_sleeping.load(std::memory_order_seq_cst) > 0) wake.notify_all();
}

void ThreadPool::State::RunRegion(uint32_t number, size_t region) {
  std::atomic<uint64_t>& ticket = regions[region].ticket;
  uint64_t seen = ticket.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(seen >> 32) == number && static_cast<uint32_t>(seen) != kClosed) {
    const Body run = body.load(std::memory_order_acquire);
    void* const with = context.load(std::memory_order_acquire);
    const int64_t total = count.load(std::memory_order_acquire);
    const int64_t step = grain.load(std::memory_order_acquire);
    const int64_t chunk = static_cast<uint32_t>(seen);
    if (chunk >= RegionStart((total + step - 1) / step, region + 1, regions.size())) return;
    if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      continue;
    }
    run(with, chunk * step, std::min(chunk * step + step, total));
    num_done.fetch_add(1, std::memory_order_release);
    seen = ticket.load(std::memory_order_acquire);
  }
}

void ThreadPool::State::RunChunks(uint32_t number, size_t self) {
  for (size_t i = 0; i < regions.size(); ++i) RunRegion(number, (self + i) % regions.size());
}

void ThreadPool::State::Work(size_t self, uint32_t last_job) {
  int spins = 0;
  while (!stopping.load(std::memory_order_acquire)) {
    const uint32_t seen_wake = wake.load(std::memory_order_acquire);
    const uint32_t number = job.load(std::memory_order_acquire);
    if (number != last_job) {
      RunChunks(number, self);
      last_job = number;
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
  const auto wanted = static_cast<size_t>(num_threads.load(std::memory_order_relaxed));
  if (regions.size() == wanted) return;
  regions = std::vector<Region>(wanted);
  const uint32_t last_job = job.load(std::memory_order_relaxed);
  for (size_t self = 1; self < wanted; ++self) {
    workers.emplace_back([this, self, last_job] { Work(self, last_job); });
  }
}

void ThreadPool::State::JoinWorkers() {
  stopping.store(true, std::memory_order_release);
  wake.fetch_add(1, std::memory_order_seq_cst);
  wake.notify_all();
  for (std::thread& worker : workers) worker.join();
  workers.clear();
  regions.clear();
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
  state.Publish(count, grain, body, context);
  state.RunChunks(state.job.load(std::memory_order_relaxed), 0);
  const auto num_chunks = static_cast<uint32_t>((count + grain - 1) / grain);
  int spins = 0;
  while (state.num_done.load(std::memory_order_acquire) != num_chunks) {
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
