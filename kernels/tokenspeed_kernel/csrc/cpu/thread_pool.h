// SPDX-License-Identifier: MIT
//
// The threads that CPU kernels run on. One pool a process, created on first use. A caller publishes
// a job of numbered chunks and takes part in it; workers claim chunks one by one, so a worker that
// the operating system has put aside costs nothing once the others have taken the chunks. Workers
// spin for a moment after a job, because the next operation of a step is microseconds away, then
// sleep.
//
// Called by every kernel entry point, from any thread. When two threads call at once, the second
// runs its chunks alone: kernels give the same bits for any number of threads. A forked child
// starts over with its own workers. The pool never runs Python code and never throws.

#ifndef TOKENSPEED_KERNEL_CSRC_CPU_THREAD_POOL_H_
#define TOKENSPEED_KERNEL_CSRC_CPU_THREAD_POOL_H_

#include <cstddef>
#include <cstdint>

namespace tokenspeed::cpu {

class ThreadPool {
 public:
  // Works on the half-open range [begin, end) of the job's units.
  using Body = void (*)(void* context, int64_t begin, int64_t end);

  static constexpr int kMaxThreads = 512;

  // The process-wide pool. It starts with one thread per CPU that the process may use.
  static ThreadPool& Global();

  // Threads that work on a job, the caller included; clamped to [1, kMaxThreads]. Waits for a job
  // in progress on another thread.
  void SetNumThreads(int num_threads);
  int num_threads() const;

  // Splits [0, count) into chunks of at most `grain` units and returns when all have run.
  void ParallelFor(int64_t count, int64_t grain, Body body, void* context);

  // Joins the workers; the next ParallelFor starts them again. For a clean exit of the process.
  void Shutdown();

 private:
  struct State;

  ThreadPool();
  static void ResetInForkedChild();

  State* state_;
};

// A 64-byte aligned buffer of at least `bytes`, owned by the calling thread and kept between calls.
// The content is undefined. `slot` tells apart buffers that are in use at the same time.
enum class ScratchSlot { kWeights, kAttention, kPartials, kPlan, kSampling, kCount };
void* Scratch(ScratchSlot slot, size_t bytes);

}  // namespace tokenspeed::cpu

#endif  // TOKENSPEED_KERNEL_CSRC_CPU_THREAD_POOL_H_
