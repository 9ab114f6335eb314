// SPDX-License-Identifier: MIT

#include "kernels/tokenspeed_kernel/csrc/cpu/recording.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <thread>

namespace tokenspeed::cpu {
namespace {

struct Step {
  int amount;
};

void Increase(int* total, const Step& step) { *total += step.amount; }

void Double(int* total) {
  if (*total > 100) throw std::invalid_argument("too large");
  *total *= 2;
}

// (total + 3) * 2, recorded while it runs.
std::shared_ptr<Recording> RecordedSum(int* total) {
  auto recording = std::make_shared<Recording>();
  Recording::Start(recording);
  Recorded<&Increase>::Call(total, Step{3});
  Recorded<&Double>::Call(total);
  Recording::Stop();
  return recording;
}

TEST(RecordingTest, CallsRunWhileTheyAreRecordedAndAgainWhenPlayed) {
  int total = 1;
  const auto recording = RecordedSum(&total);
  EXPECT_EQ(total, 8);
  EXPECT_EQ(recording->size(), 2u);
  recording->Play();
  EXPECT_EQ(total, 22);
}

TEST(RecordingTest, WhatIsCalledAfterTheEndOrPlayedIsNotAdded) {
  int total = 0;
  const auto recording = RecordedSum(&total);
  Recorded<&Double>::Call(&total);
  recording->Play();
  EXPECT_EQ(recording->size(), 2u);
}

TEST(RecordingTest, CallsOfOtherThreadsAreNotAdded) {
  int total = 0, other = 1;
  auto recording = std::make_shared<Recording>();
  Recording::Start(recording);
  std::thread([&] { Recorded<&Double>::Call(&other); }).join();
  Recorded<&Double>::Call(&total);
  Recording::Stop();
  EXPECT_EQ(other, 2);
  EXPECT_EQ(recording->size(), 1u);
}

TEST(RecordingTest, ASecondRecordingOfTheThreadIsRefused) {
  Recording::Start(std::make_shared<Recording>());
  EXPECT_THROW(Recording::Start(std::make_shared<Recording>()), std::logic_error);
  Recording::Stop();
}

TEST(RecordingTest, ACallThatThrowsEndsAPlay) {
  int total = 60;
  const auto recording = RecordedSum(&total);
  EXPECT_EQ(total, 126);
  EXPECT_THROW(recording->Play(), std::invalid_argument);
  EXPECT_EQ(total, 129);
}

}  // namespace
}  // namespace tokenspeed::cpu
