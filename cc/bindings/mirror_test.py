# SPDX-License-Identifier: MIT
"""Two schedulers fed the same calls through the binding make the same plans: what every tensor-parallel rank relies on.

The hundred thousand steps of it are played in C++ (cc/testing/random_driver_test.cc); this is about what Python sees.
"""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenspeed_cc import Outcome, Plan, RequestSpec, Scheduler, SchedulerConfig

NUM_STEPS = 3_000
PLAN = ("request_ids", "slots", "query_lens", "context_lens", "samples", "prompt_token_ids", "new_slots")
PLAN_ONLY = ("new_slot_request_ids", "block_copies", "table_updates")
OUTCOME = ("request_ids", "rows", "num_tokens", "finish", "completion_tokens", "cached_tokens", "matched_tokens")


def values(view: Plan | Outcome, names: tuple[str, ...]) -> list[list[Any]]:
    arrays: list[NDArray[Any]] = [getattr(view, name) for name in names]
    return [array.tolist() for array in arrays]


class Twins:
    """A scheduler and its mirror; every call goes to both and the answers must be equal."""

    def __init__(self, depth: int, width: int) -> None:
        def made() -> Scheduler:
            return Scheduler(
                SchedulerConfig(
                    num_blocks=40,
                    block_size=4,
                    max_num_seqs=6,
                    max_model_len=64,
                    max_batched_tokens=40,
                    chunked_prefill=True,
                    overlap_depth=depth,
                    verify_width=width,
                    max_decode_gap_tokens=16,
                    enable_prefix_caching=True,
                    eos_token_ids=[2],
                )
            )

        self.width = width
        self.pair = (made(), made())
        self.in_flight: deque[Plan] = deque()
        self.live: set[int] = set()
        self.num_tokens = 0

    def submit(self, request_id: int, rng: random.Random) -> None:
        family = rng.randrange(4)
        token_ids = np.arange(100 * family, 100 * family + rng.randrange(1, 40), dtype=np.int32)
        new_tokens = rng.randrange(1, 20)
        for scheduler in self.pair:
            scheduler.submit(
                RequestSpec(
                    request_id=request_id,
                    token_ids=token_ids,
                    max_new_tokens=new_tokens,
                    min_new_tokens=0,
                    stop_token_ids=[],
                    ignore_eos=False,
                    priority=0,
                    cache_salt=0,
                    adapter=0,
                )
            )
        self.live.add(request_id)

    def plan(self) -> bool:
        plan, twin = (scheduler.plan() for scheduler in self.pair)
        assert (plan is None) == (twin is None)
        if plan is None or twin is None:
            return False
        assert (plan.step_id, plan.num_decode_rows) == (twin.step_id, twin.num_decode_rows)
        assert values(plan, PLAN + PLAN_ONLY) == values(twin, PLAN + PLAN_ONLY)
        assert np.array_equal(self.pair[0].block_tables(), self.pair[1].block_tables())
        self.in_flight.append(plan)
        return True

    def settle(self, rng: random.Random) -> None:
        plan = self.in_flight.popleft()
        rows = plan.num_rows
        token_ids = np.array([[rng.randrange(2, 60) for _ in range(self.width)] for _ in range(rows)], np.int32)
        most = np.where(np.arange(rows) < plan.num_decode_rows, plan.query_lens, 1)
        num_tokens = np.array([rng.randrange(1, int(m) + 1) for m in most], np.int32)
        one, other = (s.advance(plan.step_id, token_ids, num_tokens) for s in self.pair)
        assert values(one, OUTCOME) == values(other, OUTCOME)
        self.num_tokens += int(one.num_tokens.sum())
        self.live -= set(one.request_ids[one.finish != 0].tolist())

    def abort(self, request_id: int) -> None:
        one, other = (scheduler.abort(request_id) for scheduler in self.pair)
        assert one is not None and other is not None
        assert (one.completion_tokens, one.cached_tokens) == (other.completion_tokens, other.cached_tokens)
        self.live.discard(request_id)


@pytest.mark.parametrize(("depth", "width"), [(0, 1), (2, 1), (1, 3)])
def test_two_schedulers_make_the_same_plans_through_the_binding(depth: int, width: int) -> None:
    rng = random.Random(depth)
    twins = Twins(depth, width)
    num_steps = 0
    next_id = 0
    while num_steps < NUM_STEPS:
        if len(twins.live) < 12 and rng.random() < 0.5:
            twins.submit(next_id, rng)
            next_id += 1
        if twins.live and rng.random() < 0.03:
            twins.abort(rng.choice(sorted(twins.live)))
        num_steps += twins.plan()
        if twins.in_flight and (len(twins.in_flight) > depth or rng.random() < 0.3):
            twins.settle(rng)
        if num_steps % 100 == 0:
            twins.pair[0].check()
    assert twins.num_tokens > NUM_STEPS
    while any(scheduler.has_work() for scheduler in twins.pair):
        twins.plan()
        if twins.in_flight:
            twins.settle(rng)
    assert twins.live == set()
    for scheduler in twins.pair:
        assert scheduler.load().active_blocks == 0
