# SPDX-License-Identifier: MIT
"""The gauges of workers: health, requests in flight, and the load that each rank reported last.

Refreshed at every scrape, so that a scrape never shows a rank that is gone or misses one that has just come, and
between scrapes by the gateway's watch. Lives on the loop's thread.
"""

from __future__ import annotations

from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.worker import Worker, WorkerState
from tokenspeed.observability.gateway_metrics import GatewayMetrics, WorkerLoad


class WorkerGauges:
    """Exports the workers of `router` under the served name of `model`."""

    def __init__(self, model: ServedModel, router: Router, metrics: GatewayMetrics) -> None:
        self._model = model
        self._router = router
        self._metrics = metrics
        self._exported: set[tuple[str, str]] = set()

    def refresh(self) -> None:
        """Set every gauge. A rank that is gone takes its load along: sums over ranks stay true."""
        current = set[tuple[str, str]]().union(*(self._export(worker) for worker in self._router.workers))
        for rank, model in self._exported - current:
            self._metrics.worker_removed(rank, model)
        self._exported = current
        policy = self._router.policy
        self._metrics.policy_remembers(policy.name, policy.num_remembered)

    def _export(self, worker: Worker) -> set[tuple[str, str]]:
        """Set the gauges of a worker; the names (rank, model) under which its ranks' loads stand, and its own."""
        metrics, model = self._metrics, self._model.name
        names = {(worker.url, "")}
        metrics.worker_health(worker.url, worker.state() is WorkerState.READY)
        checks = worker.lane.num_checks
        metrics.health_checks(checks)
        checks.clear()
        metrics.worker_requests_active(worker.url, worker.num_in_flight)
        metrics.worker_cache(worker.url, worker.blocks.num_blocks, worker.feed.take_counts() if worker.feed else {})
        if worker.model is not None:
            engine = worker.lane.ready_response
            num_tokens = engine.num_gpu_blocks * engine.block_size * len(worker.lane.ranks)
            metrics.worker_capacity(worker.url, num_tokens, engine.block_size)
        metrics.worker_vetoes(worker.url, worker.is_silent, worker.is_overloaded)
        breaker = worker.breaker
        metrics.breaker_state(worker.url, breaker.state, breaker.num_failures, breaker.num_successes)
        for rank in worker.lane.ranks.values():
            load = WorkerLoad(rank.num_running, rank.num_waiting, rank.active_blocks, rank.total_blocks)
            names.add((f"{worker.url}@{rank.index}", model))
            metrics.worker_load(f"{worker.url}@{rank.index}", model, load)
        metrics.worker_pool(worker.connection_mode, model, len(self._router.ready()))
        return names
