# SPDX-License-Identifier: MIT
"""Which of several ready workers gets a request: what a policy is, and the policies that look at loads alone.

Pure: a policy sees the tokens, the routing key and the workers' loads, gives one of the workers and the name of the
branch that it took (those of the released gateway where it has one), and remembers nothing but what it saw. Called on
the loop's thread by the `Router` alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from tokenspeed.config.gateway_balance import LoadPrices
from tokenspeed.gateway.route.kv_index import WorkerBlocks


class Loaded(Protocol):
    """What a policy knows of a worker."""

    @property
    def url(self) -> str:
        """Names the worker for as long as it is there."""

    @property
    def num_in_flight(self) -> int:
        """Requests of ours that the worker has not finished."""

    @property
    def num_waiting(self) -> int:
        """Requests of anybody that wait in the worker's engine, as it said last."""

    @property
    def num_pending(self) -> int:
        """Requests of ours that have had no token yet."""

    @property
    def num_pending_tokens(self) -> int:
        """Tokens of their prompts."""

    @property
    def kv_usage(self) -> float:
        """Share of the worker's KV pool that running requests hold, 0 to 1, by what its engine told lately."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the worker gave in a second, lately; 0: none."""

    @property
    def ready_s(self) -> float:
        """When its engine came, in `time.monotonic()` seconds."""

    @property
    def blocks(self) -> WorkerBlocks:
        """What the worker's cache holds, as far as its engine tells."""


W = TypeVar("W", bound=Loaded)


class Asked(msgspec.Struct, frozen=True):
    """What a policy knows of a request: the ids of its (first) prompt, its `x-smg-routing-key` ("": none), and the
    worker that it names itself (`x-smg-target-worker`: an id, a URL or a number; "": none). home: where there are
    several gateway processes, the URL of the key's worker, and the branch of its choice."""

    tokens: Sequence[int]
    routing_key: str
    target: str = ""
    home: tuple[str, str] = ("", "")


class Choice(NamedTuple, Generic[W]):
    """A policy's answer. `branch` says why, for metrics. `credit`: tokens of the prompt that the worker need not
    compute. `overlap`: the share of the prompt that was found in caches, 0 to 1; None where nobody looked."""

    worker: W
    branch: str
    credit: int = 0
    overlap: float | None = None


class Policy(Protocol):
    """Chooses a worker. `workers` is never empty and holds those that may take the request, in a steady order."""

    @property
    def name(self) -> str:
        """The value of `--policy`."""

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """The worker for a request."""

    def forget(self, url: str) -> None:
        """The worker has lost what it had cached, or is gone."""

    @property
    def num_remembered(self) -> int:
        """What the policy keeps: tokens of a tree, keys of a table; 0 for those that keep nothing."""

    @property
    def remembers(self) -> str:
        """What that is: the end of a metric's name, "" for nothing."""

    def num_keys(self, url: str) -> int:
        """Routing keys that a worker has; 0 where there is no table of keys."""


def least_loaded(workers: Sequence[W]) -> W:
    """The worker with the fewest requests in flight; the first of several."""
    return min(workers, key=lambda worker: worker.num_in_flight)


@dataclass(frozen=True)
class Overload:
    """When a worker is too busy for what it is the natural choice for: its load is more than the mean of all plus
    `absolute`, and more than `relative` times the mean."""

    absolute: float
    relative: float

    def holds(self, worker: Loaded, workers: Sequence[Loaded]) -> bool:
        mean = sum(other.num_in_flight for other in workers) / len(workers)
        return worker.num_in_flight > mean + self.absolute and worker.num_in_flight > self.relative * mean


class ByLoad:
    """A policy that remembers nothing of requests: `pick` sees the workers only."""

    num_remembered = 0
    remembers = ""

    def __init__(self, name: str, pick: Callable[[Sequence[Any]], Any]) -> None:
        self.name = name
        self._pick = pick

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        return Choice(self._pick(workers), "load")

    def num_keys(self, url: str) -> int:
        return 0

    def forget(self, url: str) -> None:
        """There is nothing to forget."""


def _round_robin() -> Callable[[Sequence[W]], W]:
    turns = itertools.count()
    return lambda workers: workers[next(turns) % len(workers)]


def backlog(worker: Loaded, mean_prefill_tokens: int) -> float:
    """Prompts that wait or are computed, in prompts of `mean_prefill_tokens`: ours by their tokens, those of others,
    of which the engine tells the number, by the mean."""
    return max(0, worker.num_waiting - worker.num_pending) + worker.num_pending_tokens / mean_prefill_tokens


def wait_s(worker: Loaded, prices: LoadPrices, tokens_per_s: float) -> float:
    """Seconds that a new request would wait for: the backlog at `tokens_per_s`, and the pressure on the KV pool."""
    tokens = backlog(worker, prices.mean_prefill_tokens) * prices.mean_prefill_tokens
    usage = min(worker.kv_usage, 0.999)
    return tokens / tokens_per_s + prices.kv_pressure_s * usage / (1 - usage)


def least_wait(prices: LoadPrices) -> Callable[[Sequence[W]], W]:
    """The worker with the least `wait_s`. A worker that shows no rate is taken to be as quick as the others."""

    def pick(workers: Sequence[W]) -> W:
        cap = prices.max_waiting or float("inf")
        allowed = [worker for worker in workers if max(worker.num_waiting, worker.num_pending) < cap] or workers
        rates = [worker.tokens_per_s for worker in allowed if worker.tokens_per_s > 0]
        usual = sum(rates) / len(rates) if rates else prices.tokens_per_s
        return min(allowed, key=lambda w: (wait_s(w, prices, w.tokens_per_s or usual), w.num_in_flight))

    return pick


def power_of_two(load: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    """The less loaded of two workers drawn at random."""
    return lambda workers: min(random.sample(workers, min(2, len(workers))), key=load)


BY_LOAD: dict[str, Callable[[], Callable[[Sequence[Any]], Any]]] = {
    "random": lambda: random.choice,
    "round_robin": _round_robin,
    "passthrough": lambda: lambda workers: workers[0],
    "power_of_two": lambda: power_of_two(lambda worker: worker.num_in_flight),
}
"""Makers of what `ByLoad` picks with, by the name of `--policy`."""
