# SPDX-License-Identifier: MIT
"""The gateway's metrics under the names that dashboards of the SMG gateway read (smg_*), and the engines' load.

Owns: one `CollectorRegistry` and its collectors. Called by the gateway's HTTP layer and router on the event loop's
thread; every call is a few dictionary look-ups, nothing blocks. Never reads a clock: callers pass seconds.

The engines' gauges (tokenspeed:num_requests_running, ...) are exported here too, from the load that every frame of
the lane carries, so that one scrape of the gateway shows the whole deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tokenspeed.observability.histograms import Histograms, Series

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Upper bounds in seconds. Latencies of a laptop's CPU and of a GPU cluster both fall inside.
DURATION_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 45, 60, 90, 120, 180, 240)
TOKEN_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)

BACKOFF_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouteLabels(NamedTuple):
    """What identifies a kind of routed request.

    endpoint: "chat", "completions", "generate", ...; model: the served name, "other" for names nobody serves (a
    client must not be able to create label values); connection_mode: "zmq" or "grpc".
    """

    model: str
    endpoint: str
    connection_mode: str

    @property
    def values(self) -> tuple[str, str, str, str, str]:
        """The label values in the order of ROUTE_LABELS."""
        return (self.connection_mode, "regular", self.connection_mode, self.model, self.endpoint)


ROUTE_LABELS = ("router_type", "backend_type", "connection_mode", "model", "endpoint")


class RequestTimes(NamedTuple):
    """The course of one answered request, in seconds from its arrival at the gateway.

    first_token_s is None when no token came. num_output_tokens counts all choices.
    """

    total_s: float
    first_token_s: float | None
    num_output_tokens: int


@dataclass(frozen=True)
class WorkerLoad:
    """The load an engine rank last reported. Blocks are KV blocks; active ones belong to running requests."""

    num_running: int
    num_waiting: int
    num_active_blocks: int
    num_total_blocks: int

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running requests hold, 0 to 1."""
        return self.num_active_blocks / self.num_total_blocks if self.num_total_blocks > 0 else 0.0


class _Route:
    """What is counted of one kind of routed request: its series, found once, and numbers since the last look."""

    __slots__ = ("cached", "duration", "generation", "input", "output", "streams", "tpot", "ttft", "wholes")

    def __init__(self, duration: Series, ttft: Series, generation: Series, tpot: Series) -> None:
        self.duration, self.ttft, self.generation, self.tpot = duration, ttft, generation, tpot
        self.streams = self.wholes = self.input = self.cached = self.output = 0


class GatewayMetrics:
    """All collectors of one gateway process. Make one per process (or per test) and hand it down."""

    def __init__(self, duration_buckets_s: tuple[float, ...] = DURATION_BUCKETS_S) -> None:
        self.registry = CollectorRegistry()
        self._routes: dict[RouteLabels, _Route] = {}
        self._num_active = 0
        self._counted: dict[tuple[Counter, tuple[str, ...]], float] = {}
        """What was counted since the last look, by counter and label values."""
        self._make_http(duration_buckets_s)
        self._make_router(duration_buckets_s)
        self._make_workers()
        self._make_caches()
        self._make_admission()
        self._make_breakers()
        self._make_routing()
        self._make_tokenizer()
        self._make_turns()

    def _route(self, route: RouteLabels) -> _Route:
        """What is counted of `route`. A request counts a dozen times, which the library does under a lock each, after
        a look-up that costs more than counting: it is told when somebody looks."""
        known = self._routes.get(route)
        if known is None:
            histograms = (self._router_duration, self._router_ttft, self._router_generation, self._router_tpot)
            known = self._routes[route] = _Route(*(histogram.of(*route.values) for histogram in histograms))
        return known

    def _count(self, metric: Counter, number: float, *values: str) -> None:
        """Add to a counter, which is told when somebody looks."""
        key = (metric, values)
        self._counted[key] = self._counted.get(key, 0) + number

    def render(self) -> bytes:
        """The text of GET /metrics; its content type is CONTENT_TYPE."""
        counted, self._counted = self._counted, {}
        for (metric, values), number in counted.items():
            metric.labels(*values).inc(number)
        for route, seen in self._routes.items():
            for streaming, number in (("true", seen.streams), ("false", seen.wholes)):
                if number:
                    self._router_requests.labels(*route.values, streaming).inc(number)
            for token_type, number in (("input", seen.input), ("cached", seen.cached), ("output", seen.output)):
                self._router_tokens.labels(*route.values, token_type).inc(number)
            seen.streams = seen.wholes = seen.input = seen.cached = seen.output = 0
        self._http_active.set(self._num_active)
        return generate_latest(self.registry)

    # HTTP: every request, whatever it asks for.

    def http_started(self) -> None:
        """A request's head has been read."""
        self._num_active += 1

    def connection_refused(self) -> None:
        """A connection over the limit was closed."""
        self._connections_rejected.inc()

    def connection_timed_out(self) -> None:
        """The head of a request took too long."""
        self._connection_timeouts.inc()

    def http_finished(self, method: str, path: str, status: int, error_code: str, duration_s: float) -> None:
        """The answer's last byte is out, or the client has left.

        path is the route's pattern, never the client's string; error_code is "" for a success.
        """
        self._num_active -= 1
        self._count(self._http_requests, 1, method, path)
        self._count(self._http_responses, 1, path, str(status), error_code)
        self._http_duration.of(method, path).observe(duration_s)

    # Router: requests that need an engine.

    def route_started(self, route: RouteLabels, streaming: bool) -> None:
        """A valid request was accepted for routing."""
        if streaming:
            self._route(route).streams += 1
        else:
            self._route(route).wholes += 1

    def route_failed(self, route: RouteLabels, error_type: str, reason: str) -> None:
        """The request ended with an error; reason is the error's machine-readable code."""
        self._router_errors.labels(*route.values, error_type, reason).inc()

    def route_finished(self, route: RouteLabels, times: RequestTimes) -> None:
        """The request ended with an answer: records its latencies."""
        seen = self._route(route)
        seen.duration.observe(times.total_s)
        if times.first_token_s is None:
            return
        seen.ttft.observe(times.first_token_s)
        generation_s = times.total_s - times.first_token_s
        seen.generation.observe(generation_s)
        if times.num_output_tokens > 1:
            seen.tpot.observe(generation_s / (times.num_output_tokens - 1))

    def tokens(self, route: RouteLabels, num_input: int, num_cached: int, num_output: int) -> None:
        """Tokens of one finished or broken request; cached ones are part of the input."""
        seen = self._route(route)
        seen.input += num_input
        seen.cached += num_cached
        seen.output += num_output

    # Workers.

    def worker_health(self, worker: str, healthy: bool) -> None:
        """A worker became ready (True) or was lost (False)."""
        self._worker_health.labels(worker).set(1 if healthy else 0)

    def worker_pool(self, connection_mode: str, model: str, num_workers: int) -> None:
        """How many workers serve a model now."""
        self._worker_pool.labels("regular", connection_mode, model).set(num_workers)

    def admission(self, num_admitted: int, num_waiting: int, num_rejected: int) -> None:
        """Requests that are served and that wait now, and those turned away since the last call."""
        self._admitted.set(num_admitted)
        self._admission_queue.set(num_waiting)
        self._admission_rejected.inc(num_rejected)

    def worker_requested(self, worker: str, model: str) -> None:
        """An attempt went to a worker."""
        self._count(self._worker_requests, 1, worker, model)

    def worker_failed(self, worker: str, code: str) -> None:
        """An attempt ended by an error of the worker's; code is the error's."""
        self._count(self._worker_errors, 1, worker, code)

    def worker_capacity(self, worker: str, num_tokens: int, block_size: int) -> None:
        """The KV pool of all ranks of a worker, and the size of its blocks, in tokens."""
        self._kv_capacity.labels(worker).set(num_tokens)
        self._kv_block_size.labels(worker).set(block_size)

    def worker_cache(self, worker: str, num_blocks: int, events: Mapping[str, int]) -> None:
        """What is known of a worker's prefix cache, and KV events since the last call by what became of them."""
        self._kv_blocks.labels(worker).set(num_blocks)
        for kind, number in events.items():
            if kind in self._kv_events:
                self._kv_events[kind].labels(worker).inc(number)

    def worker_vetoes(self, worker: str, is_silent: bool, is_overloaded: bool) -> None:
        """Whether a worker is avoided because it is silent, and because its engine has too much."""
        self._worker_stalled.labels(worker).set(is_silent)
        self._worker_overloaded.labels(worker).set(is_overloaded)

    def worker_requests_active(self, worker: str, num_requests: int) -> None:
        """Requests that the gateway has in flight on a worker."""
        self._worker_active.labels(worker).set(num_requests)

    def worker_selected(self, connection_mode: str, model: str, policy: str, branch: str) -> None:
        """A policy chose a worker for an attempt; branch is the policy's reason."""
        self._count(self._worker_selections, 1, "regular", connection_mode, model, policy)
        if policy in self._branches:
            self._count(self._branches[policy], 1, branch)

    def policy_remembers(self, policy: str, number: int) -> None:
        """How much a policy keeps of requests: tokens of cache_aware's tree, keys of manual's table."""
        if policy in self._remembered:
            self._remembered[policy].set(number)

    def cache_matched(self, share: float) -> None:
        """A policy looked for a prompt in caches and found this share of it, 0 to 1."""
        self._match_ratio.observe(share)

    def health_checks(self, results: Mapping[str, int]) -> None:
        """Health checks of a worker since the last call, by result: success or failure."""
        for result, number in results.items():
            self._health_checks.labels("regular", result).inc(number)

    def worker_retried(self, endpoint: str, attempt: int, pause_s: float) -> None:
        """An attempt failed and the request is sent again after a pause; attempt is that one's number, from 1."""
        self._worker_retries.labels("regular", endpoint).inc()
        self._retry_backoff.labels(str(attempt)).observe(pause_s)

    def worker_retries_exhausted(self, endpoint: str) -> None:
        """The last allowed attempt failed."""
        self._worker_retries_exhausted.labels("regular", endpoint).inc()

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

    def worker_load(self, worker: str, model: str, load: WorkerLoad) -> None:
        """An engine rank reported its load."""
        self._engine_running.labels(worker).set(load.num_running)
        self._engine_waiting.labels(worker).set(load.num_waiting)
        self._engine_usage.labels(worker).set(load.kv_usage)
        self._load_running.labels(model, worker).set(load.num_running)
        self._load_waiting.labels(model, worker).set(load.num_waiting)
        self._load_usage.labels(model, worker).set(load.kv_usage)

    def worker_removed(self, worker: str, model: str) -> None:
        """A worker left for good: its series end, so that sums over workers stay true."""
        for gauge in (self._worker_health, self._worker_active, self._engine_running, self._engine_waiting):
            _drop(gauge, worker)
        for gauge in (self._kv_capacity, self._kv_block_size):
            _drop(gauge, worker)
        for gauge in (self._kv_blocks, self._worker_stalled, self._worker_overloaded):
            _drop(gauge, worker)
        for gauge in (self._engine_usage, self._cb_state, self._cb_failures, self._cb_successes):
            _drop(gauge, worker)
        for gauge in (self._load_running, self._load_waiting, self._load_usage):
            _drop(gauge, model, worker)

    def tokenizer_lookup(self, cache: str, hit: bool, num_reused: int) -> None:
        """A tokenizer cache ("l0" or "l1") was asked; characters that were not encoded again."""
        self._count(self._tokenizer_lookups, 1, cache, "hit" if hit else "miss")
        self._count(self._tokenizer_reused, num_reused, cache)

    def turn_went_on(self, first_diverging: int | None, num_before: int) -> None:
        """A conversation's next prompt came. first_diverging: where it leaves the prompt and answer before it, of
        `num_before` tokens; None when it begins with all of them."""
        self._count(self._turns, 1, "extends" if first_diverging is None else "diverges")
        if first_diverging is not None:
            self._first_diverging.observe(first_diverging)
            self._diverged.inc(num_before - first_diverging)

    def _make_turns(self) -> None:
        registry = self.registry
        self._turns = Counter(
            "tokenspeed:turns", "Prompts that go on with a known turn, by outcome.", ("outcome",), registry=registry
        )
        self._first_diverging = Histogram(
            "tokenspeed:first_diverging_token",
            "Position of the first token of a next prompt that is not as in the turn before.",
            registry=registry,
            buckets=[float(4**power) for power in range(2, 11)],
        )
        self._diverged = Counter(
            "tokenspeed:diverged_tokens", "Tokens of turns behind the first that diverged.", registry=registry
        )

    def _make_tokenizer(self) -> None:
        self._tokenizer_lookups = Counter(
            "smg_tokenizer_cache_lookups", "Texts asked for.", ("cache", "result"), registry=self.registry
        )
        self._tokenizer_reused = Counter(
            "smg_tokenizer_cache_reused_bytes", "Characters not encoded again.", ("cache",), registry=self.registry
        )

    def _make_http(self, buckets: tuple[float, ...]) -> None:
        registry = self.registry
        self._http_active = Gauge("smg_http_connections_active", "HTTP requests being answered.", registry=registry)
        self._connections_rejected = Counter(
            "smg_http_connections_rejected", "Connections over the limit.", registry=registry
        )
        self._connection_timeouts = Counter(
            "smg_http_connection_timeouts", "Connections whose request's head took too long.", registry=registry
        )
        self._http_requests = Counter(
            "smg_http_requests_total", "HTTP requests.", ("method", "path"), registry=registry
        )
        self._http_responses = Counter(
            "smg_http_responses_total", "HTTP answers.", ("path", "status_code", "error_code"), registry=registry
        )
        self._http_duration = Histograms(
            "smg_http_request_duration_seconds",
            "From the request's head to the answer's last byte.",
            ("method", "path"),
            registry,
            buckets,
        )

    def _make_admission(self) -> None:
        self._admitted = self._gauge("smg_admission_inflight", "Requests that have a place.")
        self._admission_queue = self._gauge("smg_admission_queue_depth", "Requests that wait for a place.")
        self._admission_rejected = Counter(
            "smg_admission_queue_rejected", "Requests turned away with 429.", registry=self.registry
        )

    def _make_router(self, buckets: tuple[float, ...]) -> None:
        registry = self.registry
        self._router_requests = Counter(
            "smg_router_requests_total", "Requests routed.", (*ROUTE_LABELS, "streaming"), registry=registry
        )
        self._router_errors = Counter(
            "smg_router_request_errors_total",
            "Routed requests that ended with an error.",
            (*ROUTE_LABELS, "error_type", "reason"),
            registry=registry,
        )
        self._router_tokens = Counter(
            "smg_router_tokens_total",
            "Tokens by type: input, cached (part of input), output.",
            (*ROUTE_LABELS, "token_type"),
            registry=registry,
        )
        self._router_duration = self._route_histogram("request_duration", "Arrival to the last token.", buckets)
        self._router_ttft = self._route_histogram("ttft", "Arrival to the first token.", buckets)
        self._router_generation = self._route_histogram("generation_duration", "First to last token.", buckets)
        self._router_tpot = self._route_histogram(
            "tpot", "Mean time between tokens after the first.", TOKEN_LATENCY_BUCKETS_S
        )

    def _make_workers(self) -> None:
        registry = self.registry
        retry_labels = ("worker_type", "endpoint")
        self._worker_health = self._gauge("smg_worker_health", "1 when a worker is ready.", "worker")
        self._health_checks = Counter(
            "smg_worker_health_checks", "Answers to health checks.", ("worker_type", "result"), registry=registry
        )
        self._worker_active = self._gauge("smg_worker_requests_active", "Requests in flight.", "worker")
        self._worker_pool = self._gauge(
            "smg_worker_pool_size", "Workers that serve a model.", "worker_type", "connection_mode", "model"
        )
        self._worker_retries = Counter(
            "smg_worker_retries_total", "Attempts sent again.", retry_labels, registry=registry
        )
        self._worker_requests = Counter(
            "smg_worker_requests", "Attempts sent to a worker.", ("worker", "model"), registry=registry
        )
        self._worker_errors = Counter(
            "smg_worker_errors", "Attempts that a worker's fault ended.", ("worker", "reason"), registry=registry
        )
        self._retry_backoff = Histogram(
            "smg_worker_retry_backoff_seconds",
            "Pauses before attempts.",
            ("attempt",),
            registry=registry,
            buckets=BACKOFF_BUCKETS_S,
        )
        self._worker_retries_exhausted = Counter(
            "smg_worker_retries_exhausted_total", "Requests out of attempts.", retry_labels, registry=registry
        )
        self._engine_running = self._gauge("smg_engine_running_requests", "Requests an engine runs.", "worker")
        self._engine_waiting = self._gauge("smg_engine_waiting_requests", "Requests an engine queues.", "worker")
        self._engine_usage = self._gauge("smg_engine_token_usage", "Share of the KV pool in use, 0 to 1.", "worker")
        by_rank = ("model_name", "worker")
        self._load_running = self._gauge("tokenspeed:num_requests_running", "Requests that run.", *by_rank)
        self._load_waiting = self._gauge("tokenspeed:num_requests_waiting", "Requests that wait.", *by_rank)
        self._load_usage = self._gauge(
            "tokenspeed:kv_cache_usage_perc", "Share of the KV pool held by running requests, 0 to 1.", *by_rank
        )

    def _make_caches(self) -> None:
        self._kv_blocks = self._gauge("smg_kv_index_blocks", "Cached blocks known by KV events.", "worker")
        self._kv_events = {
            "batches": Counter("smg_kv_event_batches", "Batches of KV events.", ("worker",), registry=self.registry),
            "gaps": Counter("smg_kv_event_gaps", "Numbers that were missing.", ("worker",), registry=self.registry),
            "resyncs": Counter("smg_kv_event_resyncs", "Indexes begun anew.", ("worker",), registry=self.registry),
            "unreadable": Counter(
                "smg_kv_event_stream_errors", "Batches that cannot be read.", ("worker",), registry=self.registry
            ),
        }
        self._kv_capacity = self._gauge("smg_engine_kv_capacity_tokens", "Tokens of a worker's KV pool.", "worker")
        self._kv_block_size = self._gauge("smg_kv_block_size_tokens", "Tokens of a KV block.", "worker")
        self._worker_stalled = self._gauge("smg_worker_stalled", "1 when a worker is silent.", "worker")
        self._worker_overloaded = self._gauge("smg_workers_overloaded", "1 when a worker is overloaded.", "worker")

    def _make_breakers(self) -> None:
        registry = self.registry
        self._cb_state = self._gauge("smg_worker_cb_state", "0 closed, 1 open, 2 half open.", "worker")
        self._cb_failures = self._gauge("smg_worker_cb_consecutive_failures", "Failures in a row.", "worker")
        self._cb_successes = self._gauge("smg_worker_cb_consecutive_successes", "Successes in a row.", "worker")
        self._cb_outcomes = Counter(
            "smg_worker_cb_outcomes", "Attempts by outcome.", ("worker", "outcome"), registry=registry
        )
        self._cb_transitions = Counter(
            "smg_worker_cb_transitions", "Changes of state.", ("worker", "from", "to"), registry=registry
        )

    def _make_routing(self) -> None:
        registry = self.registry
        labels = ("worker_type", "connection_mode", "model", "policy")
        self._worker_selections = Counter("smg_worker_selection", "Workers chosen.", labels, registry=registry)
        self._branches = {
            policy: Counter(f"smg_{policy}_policy_branch", "Choices by reason.", ("branch",), registry=registry)
            for policy in ("cache_aware", "manual", "consistent_hashing", "prefix_hash", "bucket")
        }
        self._match_ratio = Histogram(
            "smg_cache_aware_match_ratio",
            "Share of a prompt that was found in caches.",
            registry=registry,
            buckets=[step / 10 for step in range(11)],
        )
        self._remembered = {
            "cache_aware": self._gauge("smg_cache_tree_tokens", "Prompt tokens that the policy remembers."),
            "manual": self._gauge("smg_manual_policy_cache_entries", "Routing keys that have a worker."),
        }

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _route_histogram(self, what: str, text: str, buckets: tuple[float, ...]) -> Histograms:
        return Histograms(f"smg_router_{what}_seconds", text, ROUTE_LABELS, self.registry, buckets)


def _drop(gauge: Gauge, *values: str) -> None:
    """Ends a series; one that never began is fine (a worker may go before it reports)."""
    try:
        gauge.remove(*values)
    except KeyError:
        return
