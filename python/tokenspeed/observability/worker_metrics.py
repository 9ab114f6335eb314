# SPDX-License-Identifier: MIT
"""The gateway's metrics of workers: their state, their engines' load, their caches, breakers and how they are chosen.

A part of `GatewayMetrics`, with the same habits: names and labels that dashboards of the SMG gateway read, no clock,
nothing that blocks. The engines' own gauges (tokenspeed:num_requests_running, ...) are exported here too, from what
every frame of the lane carries, so that one scrape of the gateway shows the whole deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BACKOFF_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_REGULAR = "regular"
_BY_RANK = ("worker", "model", "dp_rank")


@dataclass(frozen=True)
class WorkerLoad:
    """The load an engine rank last reported. Blocks are KV blocks; active ones belong to running requests.
    cache_hit_rate None: the engine tells none."""

    num_running: int
    num_waiting: int
    num_active_blocks: int
    num_total_blocks: int
    tokens_per_s: float = 0.0
    cache_hit_rate: float | None = None

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running requests hold, 0 to 1."""
        return self.num_active_blocks / self.num_total_blocks if self.num_total_blocks > 0 else 0.0


class WorkerMetrics:
    """`count(counter, number, *label values)` adds to a counter, now or when somebody looks."""

    def __init__(self, registry: CollectorRegistry, count: Callable[..., None]) -> None:
        self._registry = registry
        self._count = count
        self._states: dict[str, tuple[str, str]] = {}
        self._make_states()
        self._make_requests()
        self._make_loads()
        self._make_caches()
        self._make_breakers()
        self._make_routing()

    # ---- states ------------------------------------------------------------------------------------------------------

    def health(self, worker: str, healthy: bool) -> None:
        """A worker became ready (True) or was lost (False)."""
        self._health.labels(worker).set(1 if healthy else 0)

    def state(self, worker: str, state: str, reason: str) -> None:
        """Whether a worker gets requests: "available" or "excluded", and why not ("none" while it does)."""
        before = self._states.get(worker)
        if before is not None and before != (state, reason):
            self._state.labels(worker, *before).set(0)
        self._states[worker] = (state, reason)
        self._state.labels(worker, state, reason).set(1)

    def pool(self, connection_mode: str, model: str, num_workers: int) -> None:
        """How many workers serve a model now."""
        self._pool.labels(_REGULAR, connection_mode, model).set(num_workers)

    def vetoes(self, worker: str, is_silent: bool, is_overloaded: bool) -> None:
        """Whether a worker is avoided because it is silent, and because its engine has too much."""
        self._stalled.labels(worker).set(is_silent)
        self._overloaded.labels(worker).set(is_overloaded)

    def stall_changed(self, worker: str) -> None:
        """A worker fell silent, or is silent no more."""
        self._stalls.labels(worker).inc()

    def health_checks(self, results: Mapping[str, int]) -> None:
        """Health checks of a worker since the last call, by result: success or failure."""
        for result, number in results.items():
            self._health_checks.labels(_REGULAR, result).inc(number)

    def load_polls(self, worker: str, number: int) -> None:
        """Times since the last call that an engine was asked for its load."""
        self._load_polls.labels(worker, "poll").inc(number)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def requested(self, worker: str, model: str) -> None:
        """An attempt went to a worker."""
        self._count(self._requests, 1, worker, model)

    def failed(self, worker: str, code: str) -> None:
        """An attempt ended by an error of the worker's; code is the error's."""
        self._count(self._errors, 1, worker, code)

    def requests_active(self, worker: str, num_requests: int) -> None:
        """Requests that the gateway has in flight on a worker."""
        self._active.labels(worker).set(num_requests)

    def retried(self, endpoint: str, attempt: int, pause_s: float) -> None:
        """An attempt failed and the request is sent again after a pause; attempt is that one's number, from 1."""
        self._retries.labels(_REGULAR, endpoint).inc()
        self._backoff.labels(str(attempt)).observe(pause_s)

    def retries_exhausted(self, endpoint: str) -> None:
        """The last allowed attempt failed."""
        self._exhausted.labels(_REGULAR, endpoint).inc()

    # ---- loads and caches --------------------------------------------------------------------------------------------

    def load(self, worker: str, model: str, rank: int, load: WorkerLoad) -> None:
        """An engine rank reported its load."""
        values = (worker, model, str(rank))
        self._engine_running.labels(*values).set(load.num_running)
        self._engine_waiting.labels(*values).set(load.num_waiting)
        self._engine_usage.labels(*values).set(load.kv_usage)
        self._engine_throughput.labels(*values).set(load.tokens_per_s)
        if load.cache_hit_rate is not None:
            self._engine_hit_rate.labels(*values).set(load.cache_hit_rate)
        named = (model, f"{worker}@{rank}")
        self._load_running.labels(*named).set(load.num_running)
        self._load_waiting.labels(*named).set(load.num_waiting)
        self._load_usage.labels(*named).set(load.kv_usage)

    def capacity(self, worker: str, num_tokens: int, block_size: int) -> None:
        """The KV pool of all ranks of a worker, and the size of its blocks, in tokens."""
        self._kv_capacity.labels(worker).set(num_tokens)
        self._kv_block_size.labels(worker).set(block_size)

    def cache(self, worker: str, num_blocks: int, is_refused: bool, events: Mapping[str, int]) -> None:
        """What is known of a worker's prefix cache, whether its engine publishes no events, and what became of KV
        events since the last call: names of `KV_EVENTS`, with a detail behind a colon where that says so."""
        self._kv_blocks.labels(worker).set(num_blocks)
        self._kv_unavailable.labels(worker).set(is_refused)
        for kind, number in events.items():
            name, _, detail = kind.partition(":")
            self._kv_events[name].labels(*((worker, detail) if detail else (worker,))).inc(number)

    # ---- breakers ----------------------------------------------------------------------------------------------------

    def breaker_outcome(self, worker: str, success: bool) -> None:
        """An attempt ended in a way that speaks for (True) or against a worker."""
        self._count(self._cb_outcomes, 1, worker, "success" if success else "failure")

    def breaker_changed(self, worker: str, old: str, new: str) -> None:
        """A circuit breaker went from one state to another; closed, open or half_open."""
        self._cb_transitions.labels(worker, old, new).inc()

    def breaker_state(self, worker: str, state: int, num_failures: int, num_successes: int) -> None:
        """A circuit breaker now: 0 closed, 1 open, 2 half open; outcomes in a row."""
        self._cb_state.labels(worker).set(state)
        self._cb_failures.labels(worker).set(num_failures)
        self._cb_successes.labels(worker).set(num_successes)

    # ---- routing -----------------------------------------------------------------------------------------------------

    def selected(self, connection_mode: str, model: str, policy: str, branch: str) -> None:
        """A policy chose a worker for an attempt; branch is the policy's reason."""
        self._count(self._selections, 1, _REGULAR, connection_mode, model, policy)
        if policy in self._branches:
            self._count(self._branches[policy], 1, branch)

    def cache_matched(self, share: float) -> None:
        """A policy looked for a prompt in caches and found this share of it, 0 to 1."""
        self._match_ratio.observe(share)

    def routed(self, counts: Mapping[str, int]) -> None:
        """Requests since the last call for which no worker was as it should be, by names of `ROUTED`, and holders that
        the price of a prefix kept (prefix_margin_held)."""
        for name, number in counts.items():
            counter = self._routed[name]
            (counter if name == "prefix_margin_held" else counter.labels("selection")).inc(number)

    def keyed(self) -> None:
        """A request came with a routing key."""
        self._count(self._key_sources, 1, "header")

    def policy_remembers(self, what: str, number: int) -> None:
        """How much a policy keeps of requests: cache_tree_tokens, cache_placement_entries, manual_policy_cache_entries;
        any other name is none."""
        if what in self._remembered:
            self._remembered[what].set(number)

    def routing_keys(self, worker: str, number: int) -> None:
        """Routing keys that a worker has."""
        self._routing_keys.labels(worker).set(number)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def rank_removed(self, worker: str, model: str, rank: int) -> None:
        """A rank left: its series end, so that sums over ranks stay true."""
        for gauge in self._of_ranks:
            gauge.remove(worker, model, str(rank))
        for gauge in (self._load_running, self._load_waiting, self._load_usage):
            gauge.remove(model, f"{worker}@{rank}")

    def removed(self, worker: str) -> None:
        """A worker left for good."""
        for gauge in self._of_workers:
            gauge.remove(worker)
        self._states.pop(worker, None)
        self._state.remove_by_labels({"worker": worker})

    # ---- collectors --------------------------------------------------------------------------------------------------

    def _make_states(self) -> None:
        self._health = self._gauge("smg_worker_health", "1 when a worker is ready.", "worker")
        self._state = self._gauge(
            "smg_worker_state", "1 for a worker's state and the reason of it.", "worker", "state", "reason"
        )
        self._pool = self._gauge(
            "smg_worker_pool_size", "Workers that serve a model.", "worker_type", "connection_mode", "model"
        )
        self._stalled = self._gauge("smg_worker_stalled", "1 when a worker is silent.", "worker")
        self._overloaded = self._gauge("smg_workers_overloaded", "1 when a worker is overloaded.", "worker")
        self._stalls = self._counter("smg_worker_stall_transitions", "Times a worker fell silent or spoke.", "worker")
        self._health_checks = self._counter(
            "smg_worker_health_checks", "Answers to health checks.", "worker_type", "result"
        )
        self._load_polls = self._counter("smg_engine_load_polls", "Questions for the load.", "worker", "mode")

    def _make_requests(self) -> None:
        retry_labels = ("worker_type", "endpoint")
        self._active = self._gauge("smg_worker_requests_active", "Requests in flight.", "worker")
        self._requests = self._counter("smg_worker_requests", "Attempts sent to a worker.", "worker", "model")
        self._errors = self._counter("smg_worker_errors", "Attempts that a fault ended.", "worker", "reason")
        self._retries = self._counter("smg_worker_retries", "Attempts sent again.", *retry_labels)
        self._exhausted = self._counter("smg_worker_retries_exhausted", "Requests out of attempts.", *retry_labels)
        self._backoff = Histogram(
            "smg_worker_retry_backoff_seconds",
            "Pauses before attempts.",
            ("attempt",),
            registry=self._registry,
            buckets=BACKOFF_BUCKETS_S,
        )

    def _make_loads(self) -> None:
        self._engine_running = self._gauge("smg_engine_running_requests", "Requests an engine runs.", *_BY_RANK)
        self._engine_waiting = self._gauge("smg_engine_waiting_requests", "Requests an engine queues.", *_BY_RANK)
        self._engine_usage = self._gauge("smg_engine_token_usage", "Share of the KV pool in use, 0 to 1.", *_BY_RANK)
        self._engine_throughput = self._gauge("smg_engine_gen_throughput", "Tokens a second, lately.", *_BY_RANK)
        self._engine_hit_rate = self._gauge("smg_engine_cache_hit_rate", "Of the prefix cache, 0 to 1.", *_BY_RANK)
        self._of_ranks = (
            self._engine_running,
            self._engine_waiting,
            self._engine_usage,
            self._engine_throughput,
            self._engine_hit_rate,
        )
        named = ("model_name", "worker")
        self._load_running = self._gauge("tokenspeed:num_requests_running", "Requests that run.", *named)
        self._load_waiting = self._gauge("tokenspeed:num_requests_waiting", "Requests that wait.", *named)
        self._load_usage = self._gauge(
            "tokenspeed:kv_cache_usage_perc", "Share of the KV pool held by running requests, 0 to 1.", *named
        )

    def _make_caches(self) -> None:
        self._kv_blocks = self._gauge("smg_kv_index_blocks", "Cached blocks known by KV events.", "worker")
        self._kv_unavailable = self._gauge("smg_kv_events_unavailable", "1: an engine publishes none.", "worker")
        self._kv_events = {name: self._counter(*row) for name, row in KV_EVENTS.items()}
        self._kv_capacity = self._gauge("smg_engine_kv_capacity_tokens", "Tokens of a worker's KV pool.", "worker")
        self._kv_block_size = self._gauge("smg_kv_block_size_tokens", "Tokens of a KV block.", "worker")

    def _make_breakers(self) -> None:
        self._cb_state = self._gauge("smg_worker_cb_state", "0 closed, 1 open, 2 half open.", "worker")
        self._cb_failures = self._gauge("smg_worker_cb_consecutive_failures", "Failures in a row.", "worker")
        self._cb_successes = self._gauge("smg_worker_cb_consecutive_successes", "Successes in a row.", "worker")
        self._cb_outcomes = self._counter("smg_worker_cb_outcomes", "Attempts by outcome.", "worker", "outcome")
        self._cb_transitions = self._counter("smg_worker_cb_transitions", "Changes of state.", "worker", "from", "to")

    def _make_routing(self) -> None:
        labels = ("worker_type", "connection_mode", "model", "policy")
        self._selections = self._counter("smg_worker_selection", "Workers chosen.", *labels)
        self._branches = {
            policy: self._counter(f"smg_{policy}_policy_branch", "Choices by reason.", "branch")
            for policy in ("cache_aware", "manual", "consistent_hashing", "prefix_hash", "bucket")
        }
        self._match_ratio = Histogram(
            "smg_cache_aware_match_ratio",
            "Share of a prompt that was found in caches.",
            registry=self._registry,
            buckets=[step / 10 for step in range(11)],
        )
        self._routed = {name: self._counter(f"smg_worker_{name}", text, "stage") for name, text in ROUTED.items()}
        self._routed["prefix_margin_held"] = self._counter(
            "smg_cache_aware_prefix_margin_held", "Holders that the price of a prefix kept from spilling."
        )
        self._key_sources = self._counter("smg_routing_key_source", "Requests with a routing key.", "source")
        self._routing_keys = self._gauge("smg_worker_routing_keys_active", "Routing keys of a worker.", "worker")
        self._remembered = {
            "cache_tree_tokens": self._gauge("smg_cache_tree_tokens", "Prompt tokens that the policy remembers."),
            "cache_placement_entries": self._gauge("smg_cache_placement_entries", "Heads of prompts remembered."),
            "manual_policy_cache_entries": self._gauge("smg_manual_policy_cache_entries", "Keys that have a worker."),
        }
        self._of_workers = (
            *(self._health, self._stalled, self._overloaded, self._active, self._routing_keys),
            *(self._kv_blocks, self._kv_unavailable, self._kv_capacity, self._kv_block_size),
            *(self._cb_state, self._cb_failures, self._cb_successes),
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)


ROUTED = {
    "liveness_fallback": "Requests given to a silent worker for want of others.",
    "overload_fallback": "Requests given to an overloaded worker for want of others.",
    "overload_shed": "Requests refused because every worker was overloaded.",
}
"""Counters smg_worker_NAME_total and their texts."""

KV_EVENTS: dict[str, tuple[str, ...]] = {
    "batches": ("smg_kv_event_batches", "Batches of KV events.", "worker"),
    "blocks": ("smg_kv_event_blocks", "Blocks in them.", "worker"),
    "gaps": ("smg_kv_event_gaps", "Gaps in the numbers, by what was done.", "worker", "outcome"),
    "missed": ("smg_kv_event_missed_batches", "Batches that were lost for good.", "worker"),
    "resyncs": ("smg_kv_event_resyncs", "Indexes begun anew, by why.", "worker", "reason"),
    "unreadable": ("smg_kv_event_stream_errors", "Batches that cannot be read.", "worker"),
    "subscriptions": ("smg_kv_event_subscriptions", "Subscriptions begun.", "worker"),
    "parentless_stores": ("smg_kv_event_parentless_stores", "Stores behind a block that is not known.", "worker"),
    "parentless_blocks": ("smg_kv_event_parentless_blocks", "Blocks of those.", "worker"),
}
"""What is counted of KV events: name, text and labels of each counter."""
