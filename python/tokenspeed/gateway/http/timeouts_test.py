# SPDX-License-Identifier: MIT
"""Limits that share a timer: what is late is called once, what has ended is not, and tasks are cancelled as theirs."""

from __future__ import annotations

import asyncio

import pytest

from tokenspeed.gateway.http.timeouts import TimeLimit, Timeouts

FOREVER = 60.0


def test_what_ends_in_time_is_not_called_and_what_does_not_is_called_once_in_order() -> None:
    async def course() -> list[str]:
        timeouts, called = Timeouts(0.02), list[str]()
        callers = {name: (lambda name=name: called.append(name)) for name in ("a", "b", "c", "d")}
        for name in ("a", "b", "c"):
            timeouts.begin(callers[name])
        timeouts.begin(callers["a"])  # again: nothing new
        timeouts.end(callers["b"])
        while len(called) < 2:
            await asyncio.sleep(0.001)
        timeouts.begin(callers["d"])  # after a pause without any
        timeouts.end(callers["a"])
        while len(called) < 3:
            await asyncio.sleep(0.001)
        return called

    assert asyncio.run(course()) == ["a", "c", "d"]


def test_a_task_that_takes_too_long_gets_a_timeout_and_goes_on_after_it() -> None:
    async def course() -> str:
        timeouts = Timeouts(0.01)
        with pytest.raises(TimeoutError):
            with TimeLimit(timeouts):
                await asyncio.sleep(FOREVER)
        await asyncio.sleep(0.03)  # nothing of the limit is left behind
        with TimeLimit(timeouts):
            return "in time"

    assert asyncio.run(course()) == "in time"


def test_a_cancel_from_outside_is_no_timeout_also_when_both_come() -> None:
    async def course(late: bool) -> None:
        timeouts = Timeouts(0.01 if late else FOREVER)

        async def work() -> None:
            with TimeLimit(timeouts):
                try:
                    await asyncio.sleep(FOREVER)
                finally:
                    if late:  # the limit ran out; then somebody cancels too
                        task.cancel()

        task = asyncio.create_task(work())
        if not late:
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(course(late=False))
    asyncio.run(course(late=True))


def test_an_error_inside_stays_itself() -> None:
    async def course() -> None:
        with TimeLimit(Timeouts(FOREVER)):
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        asyncio.run(course())
