# SPDX-License-Identifier: MIT
"""The retry policy: when a request is sent to an engine again, how often, after which pause.

A request is retried only while nothing of an answer has reached the client, and only after a fault that is not the
client's: the engine was lost, or refused with a status of `RETRYABLE_STATUSES`. Not after a call that took longer than
it may: that is the request's answer. Pauses grow exponentially with
jitter, so that the clients of one dead engine do not come back at the same instant. The seed was drawn before the
first attempt, so a retry gives the text that the first attempt would have given.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tokenspeed.gateway.http.errors import RETRYABLE_STATUSES, ApiError

T = TypeVar("T")

_FINAL_CODES = frozenset({"call_upstream_timeout"})


@dataclass(frozen=True)
class RetryPolicy:
    """`max_attempts` counts the first one too; 1 never retries."""

    max_attempts: int
    initial_backoff_s: float
    max_backoff_s: float
    multiplier: float
    jitter: float
    """Share of a pause by which it may be shorter or longer."""

    def backoff_s(self, attempt: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
        """The pause after attempt number `attempt` (from 1) failed."""
        pause = min(self.initial_backoff_s * self.multiplier ** (attempt - 1), self.max_backoff_s)
        return pause * uniform(1 - self.jitter, 1 + self.jitter)


class Retried(Protocol):
    """What is retried, as far as the loop needs to know it."""

    @property
    def answered(self) -> bool:
        """Whether the client has got something."""

    def on_retry(self, attempt: int, pause_s: float) -> None:
        """Attempt number `attempt` failed, and another one comes after a pause."""

    def on_exhausted(self) -> None:
        """The last allowed attempt failed."""


async def with_retries(policy: RetryPolicy, retried: Retried, attempt: Callable[[], Awaitable[T]]) -> T:
    """Run `attempt` until it succeeds, fails for good, or the policy gives up; raises the last `ApiError`."""
    number = 1
    while True:
        try:
            return await attempt()
        except ApiError as error:
            if retried.answered or error.status not in RETRYABLE_STATUSES or error.code in _FINAL_CODES:
                raise
            if number >= policy.max_attempts:
                if policy.max_attempts > 1:
                    retried.on_exhausted()
                raise
        pause_s = policy.backoff_s(number)
        retried.on_retry(number, pause_s)
        await asyncio.sleep(pause_s)
        number += 1
