# SPDX-License-Identifier: MIT
"""All workers of this gateway, and the choice of one for a request.

Owns the workers' lanes; lives on the loop's thread. A worker that does not make progress gets new requests only when
no other can take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenspeed.gateway.http.errors import no_available_workers
from tokenspeed.gateway.route.policy import POLICIES
from tokenspeed.gateway.route.worker import Worker, WorkerState
from tokenspeed.rpc.lane.gateway_end import LaneOptions
from tokenspeed.rpc.lane.wire import ReadyResponse


class Router:
    """Routes to the workers of `urls` by the policy named `policy`; `on_change` hears of every change of state."""

    def __init__(
        self,
        urls: Sequence[str],
        policy: str,
        options: LaneOptions,
        stall_s: float,
        on_change: Callable[[Worker], None] | None = None,
    ) -> None:
        self.workers = [Worker(url, options, stall_s, on_change) for url in urls]
        self._choose = POLICIES[policy]()

    def open(self) -> None:
        """Bind every worker's lane."""
        for worker in self.workers:
            worker.lane.open()

    def close(self) -> None:
        """Close every lane; requests in flight fail."""
        for worker in self.workers:
            worker.lane.close()

    @property
    def num_in_flight(self) -> int:
        """Requests that some worker has not finished."""
        return sum(worker.num_in_flight for worker in self.workers)

    def ready(self) -> list[Worker]:
        """Workers that take requests; those that make progress, or if there is none, those that seem stuck."""
        states = [(worker, worker.state()) for worker in self.workers]
        moving = [worker for worker, state in states if state is WorkerState.READY]
        return moving or [worker for worker, state in states if state is WorkerState.STALLED]

    def pick(self) -> Worker:
        """The worker for the next request. Raises `ApiError` 503 when there is none."""
        return self._choose(self._some_ready())

    def facts(self) -> ReadyResponse:
        """What a ready engine said about itself. Raises `ApiError` 503 when there is none."""
        return self._some_ready()[0].lane.ready_response

    def _some_ready(self) -> list[Worker]:
        ready = self.ready()
        if not ready:
            reasons = "; ".join(f"{worker.url}: {worker.reason}" for worker in self.workers)
            raise no_available_workers(f"no worker is ready ({reasons})" if reasons else "this gateway has no workers")
        return ready
