// SPDX-License-Identifier: MIT

#include <vector>

#include "cc/scheduler/claims.h"
#include "cc/scheduler/recent_counters.h"
#include "cc/scheduler/waiting_queue.h"
#include "gtest/gtest.h"

namespace tokenspeed {
namespace {

Request Make(int64_t id, int64_t due) {
  Request request(RequestId(id), {1}, StopRule{1, 0, false, {}});
  request.key = {due, id};
  return request;
}

TEST(WaitingQueue, IsOrderedByDueStepThenArrival) {
  Request a = Make(1, 5);
  Request b = Make(2, 3);
  Request c = Make(3, 5);
  WaitingQueue queue;
  queue.Add(c);
  queue.Add(a);
  queue.Add(b);
  std::vector<int64_t> order;
  for (const auto& [key, request] : queue) order.push_back(request->id.value());
  EXPECT_EQ(order, (std::vector<int64_t>{2, 1, 3}));
  EXPECT_TRUE(queue.Remove(a));
  EXPECT_FALSE(queue.Remove(a));
  EXPECT_EQ(queue.size(), 2);
}

TEST(Claims, TheFirstHolderOfAHashKeepsIt) {
  Request a = Make(1, 0);
  Request b = Make(2, 0);
  Claims claims;
  claims.Move(a, 7);
  claims.Move(b, 7);
  claims.Move(b, 0);
  EXPECT_TRUE(claims.IsClaimed(7));
  claims.Move(a, 8);
  EXPECT_FALSE(claims.IsClaimed(7));
  EXPECT_TRUE(claims.IsClaimed(8));
  claims.Move(a, 0);
  EXPECT_EQ(claims.size(), 0u);
}

TEST(RecentCounters, ForgetTheOldestBeyondTheirCapacity) {
  RecentCounters recent(2);
  for (int64_t id : {1, 2, 3})
    recent.Add(RequestId(id), RequestCounters{.completion_tokens = static_cast<int32_t>(id)});
  EXPECT_FALSE(recent.Find(RequestId(1)));
  EXPECT_EQ(recent.Find(RequestId(3))->completion_tokens, 3);
}

}  // namespace
}  // namespace tokenspeed
