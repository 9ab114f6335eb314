# SPDX-License-Identifier: MIT
"""All workers of this gateway, and the choice of one for a request.

Owns the workers' lanes; lives on the loop's thread. A worker that does not make progress gets new requests only when
no other can take them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from tokenspeed.gateway.http.errors import invalid, no_available_workers
from tokenspeed.gateway.route.breaker import BreakerState
from tokenspeed.gateway.route.policy import Asked, Choice, Policy
from tokenspeed.gateway.route.shared_keys import SharedKeys
from tokenspeed.gateway.route.worker import Watcher, Worker, WorkerOptions, WorkerState
from tokenspeed.rpc.lane.wire import ReadyResponse

_POLL_S = 0.02


class DuplicateWorker(ValueError):
    """The gateway has a worker with this URL already."""


class Router:
    """Routes to the workers of `urls` by `policy`; `watcher` hears of every change of a worker."""

    def __init__(self, urls: Sequence[str], policy: Policy, options: WorkerOptions, watcher: Watcher) -> None:
        self.policy = policy
        self._watcher = watcher
        self._options = options
        self._facts: ReadyResponse | None = None
        self._model: str | None = None
        self.counts: Counter[str] = Counter()
        """Requests for which no worker was as it should be, since somebody looked: names of `ROUTED`."""
        self.keys: SharedKeys | None = None
        """Where there are several gateway processes: who knows the workers of routing keys."""
        self._follows_kv = policy.name == "cache_aware"
        self.workers = [Worker(url, options, self) for url in urls]

    def open(self) -> None:
        """Bind every worker's lane."""
        for worker in self.workers:
            worker.lane.open()

    def close(self) -> None:
        """Close every lane; requests in flight fail."""
        for worker in self.workers:
            worker.leave_kv()
            worker.lane.close()

    def add(self, url: str) -> Worker:
        """A new worker, whose engine may dial from now on. Raises `DuplicateWorker`, `AddressError`, `zmq.ZMQError`."""
        if any(worker.url == url for worker in self.workers):
            raise DuplicateWorker(url)
        worker = Worker(url, self._options, self)
        try:
            worker.lane.open()
        except BaseException:
            worker.lane.close()
            raise
        self.workers.append(worker)
        return worker

    async def retire(self, worker: Worker, settle_s: float, grace_s: float) -> None:
        """Give the worker no more requests, and remove it when it has none in flight, not before `settle_s`; after
        `grace_s` those that are left fail, and may be tried elsewhere."""
        worker.draining = True
        self._facts = self._model = None
        begun_s = time.monotonic()
        while (worker.num_in_flight and time.monotonic() < begun_s + grace_s) or time.monotonic() < begun_s + settle_s:
            await asyncio.sleep(_POLL_S)
        worker.leave_kv()
        worker.lane.close()
        self.workers.remove(worker)
        self.policy.forget(worker.url)

    @property
    def connection_mode(self) -> str:
        """How most workers are reached: that of the first."""
        return self.workers[0].connection_mode if self.workers else "zmq"

    @property
    def num_in_flight(self) -> int:
        """Requests that some worker has not finished."""
        return sum(worker.num_in_flight for worker in self.workers)

    def find(self, name: str) -> Worker | None:
        """The worker with this id, URL or place in the list of workers."""
        for number, worker in enumerate(self.workers):
            if name in (worker.id, worker.url, str(number)):
                return worker
        return None

    def ready(self) -> list[Worker]:
        """Workers that take requests; those that make progress, or if there is none, those that seem stuck."""
        states = [(worker, worker.state()) for worker in self.workers]
        moving = [worker for worker, state in states if state is WorkerState.READY]
        return moving or [worker for worker, state in states if state is WorkerState.STALLED]

    def pick(self, asked: Asked, tried: Collection[str]) -> Choice[Worker]:
        """The worker for a request, and the policy's reason. Workers that have failed the request (`tried`), whose
        breaker is open, that are silent, wedged or overloaded are asked only if there is no other; of the rest, those
        of the highest priority. Raises `ApiError` 503 when there is none, and 400 for a target that is not there."""
        if asked.target:
            return Choice(self._targeted(asked.target), "target_worker_hit")
        return self.policy.choose(self._candidates(tried), asked)

    async def place(self, asked: Asked, tried: Collection[str]) -> Choice[Worker]:
        """The same, where perhaps another process is asked for the worker of a routing key."""
        if self.keys is None or asked.target or not asked.routing_key:
            return self.pick(asked, tried)
        left = self._candidates(tried)
        home = await self.keys.home(asked.routing_key, left)
        return self.policy.choose(left, msgspec.structs.replace(asked, home=home))

    def _candidates(self, tried: Collection[str]) -> list[Worker]:
        left = self._some_ready()
        if len(left) == 1 and not self._options.sheds:
            return left
        left = [worker for worker in left if worker.breaker.allows] or left
        left = [worker for worker in left if worker.url not in tried] or left
        awake = [worker for worker in left if not (worker.is_silent or worker.is_wedged)]
        self.counts["liveness_fallback"] += not awake
        left = awake or left
        calm = [worker for worker in left if not worker.is_overloaded]
        if not calm:
            self.counts["overload_shed" if self._options.sheds else "overload_fallback"] += 1
            if self._options.sheds:
                raise no_available_workers("every worker is overloaded")
        left = calm or left
        first = max(worker.priority for worker in left)
        return [worker for worker in left if worker.priority == first]

    def _targeted(self, name: str) -> Worker:
        worker = self.find(name)
        if worker is None:
            header = "x-smg-target-worker"
            raise invalid(header, "worker_not_found", f"{header}: there is no worker {name!r}")
        if worker not in self.ready():
            raise no_available_workers(f"worker {worker.url}, which was asked for, is not ready ({worker.reason})")
        return worker

    def facts(self) -> ReadyResponse:
        """What a ready engine said about itself. Raises `ApiError` 503 when there is none."""
        if self._facts is None:
            self._facts = self._some_ready()[0].lane.ready_response
        return self._facts

    @property
    def model(self) -> str | None:
        """The name under which the first worker with an engine serves its model."""
        if self._model is None:
            self._model = next((worker.model for worker in self.workers if worker.model), None)
        return self._model

    def health(self, worker: Worker) -> None:
        """A worker became ready or was lost."""
        self._facts = self._model = None  # asked several times a request, and new only now
        if worker.state() is WorkerState.READY and self._follows_kv:
            worker.follow_kv()
        if worker.state() is WorkerState.ABSENT:
            worker.leave_kv()
            # What its engine had cached went with it.
            self.policy.forget(worker.url)
        self._watcher.health(worker)

    def breaker(self, worker: Worker, old: BreakerState, new: BreakerState) -> None:
        """A worker's breaker changed."""
        self._watcher.breaker(worker, old, new)

    def _some_ready(self) -> list[Worker]:
        ready = self.ready()
        if not ready:
            reasons = "; ".join(f"{worker.url}: {worker.reason}" for worker in self.workers)
            raise no_available_workers(f"no worker is ready ({reasons})" if reasons else "this gateway has no workers")
        return ready
