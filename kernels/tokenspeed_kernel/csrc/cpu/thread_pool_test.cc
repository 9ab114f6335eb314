// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace tokenspeed::cpu {
namespace {

// Counts how often each unit ran, and the largest chunk.
struct Tally {
  explicit Tally(int64_t count) : times(count) {}

  static void Run(void* context, int64_t begin, int64_t end) {
    auto& tally = *static_cast<Tally*>(context);
    for (int64_t i = begin; i < end; ++i) tally.times[i].fetch_add(1);
    int64_t seen = tally.largest.load();
    while (seen < end - begin && !tally.largest.compare_exchange_weak(seen, end - begin)) {
    }
  }

  bool EachOnce() const {
    for (const auto& count : times) {
      if (count.load() != 1) return false;
    }
    return true;
  }

  std::vector<std::atomic<int>> times;
  std::atomic<int64_t> largest{0};
};

class ThreadPoolTest : public ::testing::Test {
 protected:
  ThreadPoolTest() { ThreadPool::Global().SetNumThreads(3); }
};

TEST_F(ThreadPoolTest, EveryUnitRunsOnceForAnyCountAndGrain) {
  for (const int64_t count : {0, 1, 2, 7, 64, 1000}) {
    for (const int64_t grain : {1, 3, 64, 5000}) {
      Tally tally(count);
      ThreadPool::Global().ParallelFor(count, grain, &Tally::Run, &tally);
      EXPECT_TRUE(tally.EachOnce()) << count << " by " << grain;
    }
  }
}

TEST_F(ThreadPoolTest, ChunksAreNotLargerThanTheGrainWhenWorkIsShared) {
  Tally tally(1000);
  ThreadPool::Global().ParallelFor(1000, 7, &Tally::Run, &tally);
  EXPECT_EQ(tally.largest.load(), 7);
}

TEST_F(ThreadPoolTest, ManyJobsInARowAreAllComplete) {
  for (int job = 0; job < 5000; ++job) {
    Tally tally(5);
    ThreadPool::Global().ParallelFor(5, 1, &Tally::Run, &tally);
    ASSERT_TRUE(tally.EachOnce()) << job;
  }
}

TEST_F(ThreadPoolTest, SleepingWorkersWakeForALaterJob) {
  Tally first(100);
  ThreadPool::Global().ParallelFor(100, 1, &Tally::Run, &first);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Tally second(100);
  ThreadPool::Global().ParallelFor(100, 1, &Tally::Run, &second);
  EXPECT_TRUE(second.EachOnce());
}

TEST_F(ThreadPoolTest, CallersOnTwoThreadsBothFinish) {
  std::atomic<int> failures{0};
  const auto call = [&failures] {
    for (int job = 0; job < 500; ++job) {
      Tally tally(16);
      ThreadPool::Global().ParallelFor(16, 1, &Tally::Run, &tally);
      if (!tally.EachOnce()) failures.fetch_add(1);
    }
  };
  std::thread other(call);
  call();
  other.join();
  EXPECT_EQ(failures.load(), 0);
}

TEST_F(ThreadPoolTest, ForkedChildHasWorkersOfItsOwn) {
  Tally before(100);
  ThreadPool::Global().ParallelFor(100, 1, &Tally::Run, &before);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Tally tally(100);
    ThreadPool::Global().ParallelFor(100, 1, &Tally::Run, &tally);
    ThreadPool::Global().Shutdown();
    _exit(tally.EachOnce() && ThreadPool::Global().num_threads() == 3 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_F(ThreadPoolTest, PoolRunsAgainAfterShutdown) {
  ThreadPool::Global().Shutdown();
  Tally tally(100);
  ThreadPool::Global().ParallelFor(100, 1, &Tally::Run, &tally);
  EXPECT_TRUE(tally.EachOnce());
}

TEST_F(ThreadPoolTest, NumberOfThreadsIsClamped) {
  ThreadPool::Global().SetNumThreads(0);
  EXPECT_EQ(ThreadPool::Global().num_threads(), 1);
  ThreadPool::Global().SetNumThreads(1 << 20);
  EXPECT_EQ(ThreadPool::Global().num_threads(), ThreadPool::kMaxThreads);
  ThreadPool::Global().SetNumThreads(2);
}

TEST(ScratchTest, BuffersAreAlignedAndKeptAndApart) {
  void* const weights = Scratch(ScratchSlot::kWeights, 100);
  void* const plan = Scratch(ScratchSlot::kPlan, 100);
  EXPECT_NE(weights, plan);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(weights) % 64, 0u);
  EXPECT_EQ(Scratch(ScratchSlot::kWeights, 50), weights);
}

TEST(ScratchTest, ThreadsHaveTheirOwnBuffers) {
  void* const mine = Scratch(ScratchSlot::kWeights, 100);
  void* theirs = nullptr;
  std::thread([&theirs] { theirs = Scratch(ScratchSlot::kWeights, 100); }).join();
  EXPECT_NE(theirs, mine);
}

}  // namespace
}  // namespace tokenspeed::cpu
