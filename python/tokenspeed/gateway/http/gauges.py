# SPDX-License-Identifier: MIT
"""The gauges of workers: health, requests in flight, and the load that each rank reported last.

Refreshed at every scrape, so that a scrape never shows a rank that is gone or misses one that has just come, and
between scrapes by the gateway's watch. Lives on the loop's thread.
"""

from __future__ import annotations

import time

from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.route.breaker import BreakerState
from tokenspeed.gateway.route.cache_aware import CacheAware
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.worker import Worker, WorkerState
from tokenspeed.observability.gateway_metrics import GatewayMetrics
from tokenspeed.observability.worker_metrics import WorkerLoad


class WorkerGauges:
    """Exports the workers of `router` under the served name of `model`."""

    def __init__(self, model: ServedModel, router: Router, metrics: GatewayMetrics) -> None:
        self._model = model
        self._router = router
        self._metrics = metrics.workers
        self._silent: dict[str, bool] = {}
        """Of every worker that is exported, whether it was silent."""
        self._ranks: set[tuple[str, str, int]] = set()
        """(worker, model, rank) of every rank that is exported."""

    def refresh(self) -> None:
        """Set every gauge. A rank that is gone takes its load along: sums over ranks stay true."""
        ranks = set[tuple[str, str, int]]()
        for worker in self._router.workers:
            self._export(worker)
            ranks |= self._export_ranks(worker)
        for rank in self._ranks - ranks:
            self._metrics.rank_removed(*rank)
        self._ranks = ranks
        for url in self._silent.keys() - {worker.url for worker in self._router.workers}:
            del self._silent[url]
            self._metrics.removed(url)
        self._export_policy()

    def _export_policy(self) -> None:
        policy, counts = self._router.policy, self._router.counts
        self._metrics.policy_remembers(policy.remembers, policy.num_remembered)
        if isinstance(policy, CacheAware):
            counts["prefix_margin_held"], policy.num_margin_held = policy.num_margin_held, 0
        self._metrics.routed(counts)
        counts.clear()

    def _export(self, worker: Worker) -> None:
        metrics, url = self._metrics, worker.url
        metrics.health(url, worker.state() is WorkerState.READY)
        metrics.state(url, *_routing_state(worker))
        metrics.health_checks(worker.lane.num_checks)
        worker.lane.num_checks.clear()
        if worker.connection_mode == "grpc":
            metrics.load_polls(url, worker.lane.num_polls)
            worker.lane.num_polls = 0
        metrics.requests_active(url, worker.num_in_flight)
        metrics.routing_keys(url, self._router.policy.num_keys(url))
        metrics.cache(url, worker.blocks.num_blocks, worker.blocks.refuses, worker.blocks.take_counts())
        if worker.model is not None:
            engine = worker.lane.ready_response
            num_tokens = engine.num_gpu_blocks * engine.block_size * len(worker.lane.ranks)
            metrics.capacity(url, num_tokens, engine.block_size)
        metrics.vetoes(url, worker.is_silent, worker.is_overloaded)
        if self._silent.get(url, False) != worker.is_silent:
            metrics.stall_changed(url)
        self._silent[url] = worker.is_silent
        breaker = worker.breaker
        metrics.breaker_state(url, breaker.state, breaker.num_failures, breaker.num_successes)
        metrics.pool(worker.connection_mode, self._model.name, len(self._router.ready()))

    def _export_ranks(self, worker: Worker) -> set[tuple[str, str, int]]:
        """Set the gauges of a worker's ranks; which these are."""
        model, now_s, names = self._model.name, time.monotonic(), set[tuple[str, str, int]]()
        for rank in worker.lane.ranks.values():
            rank.measure(now_s)
            load = WorkerLoad(
                rank.num_running,
                rank.num_waiting,
                rank.active_blocks,
                rank.total_blocks,
                rank.tokens_per_s,
                rank.cache_hit_rate,
            )
            names.add((worker.url, model, rank.index))
            self._metrics.load(worker.url, model, rank.index, load)
        return names


def _routing_state(worker: Worker) -> tuple[str, str]:
    """(state, reason): the first thing that keeps requests away from a worker while there are others."""
    state = worker.state()
    if state is WorkerState.ABSENT:
        return "excluded", "not_ready" if worker.ready_s else "pending"
    vetoes = {
        "draining": state is WorkerState.DRAINING,
        "failed": worker.lane.is_sick,
        "unreachable": worker.is_silent,
        "wedged": worker.is_wedged,
        "overloaded": worker.is_overloaded,
        "circuit_open": worker.breaker.state is BreakerState.OPEN,
    }
    reason = next((name for name, holds in vetoes.items() if holds), "none")
    return ("available" if reason == "none" else "excluded"), reason
