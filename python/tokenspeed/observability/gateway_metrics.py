# SPDX-License-Identifier: MIT
"""The gateway's metrics under the names that dashboards of the SMG gateway read (smg_*), and the engines' load.

Owns: one `CollectorRegistry` and its collectors; those of workers are in `WorkerMetrics`. Called by the gateway's HTTP
layer and router on the event loop's thread; every call is a few dictionary look-ups, nothing blocks. Never reads a
clock: callers pass seconds. `testdata/smg_metrics.tsv` lists every name of the released gateway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tokenspeed.observability.histograms import Histograms, Series
from tokenspeed.observability.scheduler_metrics import SchedulerMetrics
from tokenspeed.observability.worker_metrics import WorkerMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Upper bounds in seconds. Latencies of a laptop's CPU and of a GPU cluster both fall inside.
DURATION_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 45, 60, 90, 120, 180, 240),
    *(300, 480, 900, 1200, 1800, 2700, 3600, 5400, 7200),
)
FIRST_TOKEN_BUCKETS_S = (
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120),
)
TOKEN_BUCKETS_S = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1, 2.5, 10),
)


class RouteLabels(NamedTuple):
    """What identifies a kind of routed request.

    endpoint: "chat", "completions", "generate", ...; model: the served name, "other" for names nobody serves (a
    client must not be able to create label values); connection_mode: "zmq" or "grpc".
    """

    model: str
    endpoint: str
    connection_mode: str

    @property
    def values(self) -> tuple[str, str, str, str]:
        """The label values in the order of ROUTE_LABELS."""
        return ("grpc", "regular", self.model, self.endpoint)

    @property
    def whole(self) -> tuple[str, str, str, str, str]:
        """Those in the order of WHOLE_LABELS."""
        return ("grpc", "regular", self.connection_mode, self.model, self.endpoint)


ROUTE_LABELS = ("router_type", "backend_type", "model", "endpoint")
"""Of what concerns tokens. The router that sends tokens to its workers is "grpc", whichever way they go."""
WHOLE_LABELS = ("router_type", "backend_type", "connection_mode", "model", "endpoint")
"""Of what concerns requests."""


class RequestTimes(NamedTuple):
    """The course of one answered request, in seconds from its arrival at the gateway.

    first_token_s is None when no token came. num_output_tokens counts all choices.
    """

    total_s: float
    first_token_s: float | None
    num_output_tokens: int


class _Route:
    """What is counted of one kind of routed request: its series, found once, and numbers since the last look."""

    __slots__ = (
        *("duration", "ttft", "first", "generation", "tpot", "token"),
        *("streams", "wholes", "input", "cached", "output"),
    )

    def __init__(self, duration: Series, of_tokens: Sequence[Series]) -> None:
        self.duration = duration
        self.ttft, self.first, self.generation, self.tpot, self.token = of_tokens
        self.streams = self.wholes = self.input = self.cached = self.output = 0


class GatewayMetrics:
    """All collectors of one gateway process. Make one per process (or per test) and hand it down."""

    def __init__(self, duration_buckets_s: tuple[float, ...] = DURATION_BUCKETS_S) -> None:
        self.registry = CollectorRegistry()
        self._routes: dict[RouteLabels, _Route] = {}
        self._counted: dict[tuple[Counter, tuple[str, ...]], float] = {}
        """What was counted since the last look, by counter and label values."""
        self._make_http(duration_buckets_s)
        self._make_router(duration_buckets_s)
        self._make_admission()
        self._make_tokenizer()
        self._make_turns()
        self.workers = WorkerMetrics(self.registry, self._count)
        self.scheduler = SchedulerMetrics(self.registry)

    def _route(self, route: RouteLabels) -> _Route:
        """What is counted of `route`. A request counts a dozen times, which the library does under a lock each, after
        a look-up that costs more than counting: it is told when somebody looks."""
        known = self._routes.get(route)
        if known is None:
            of_tokens = [histograms.of(*route.values) for histograms in self._of_tokens]
            known = self._routes[route] = _Route(self._router_duration.of(*route.whole), of_tokens)
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
                    self._router_requests.labels(*route.whole, streaming).inc(number)
            for token_type, number in (("input", seen.input), ("cached", seen.cached), ("output", seen.output)):
                self._router_tokens.labels(*route.values, token_type).inc(number)
            seen.streams = seen.wholes = seen.input = seen.cached = seen.output = 0
        return generate_latest(self.registry)

    # HTTP: every request, whatever it asks for.

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
        self._router_errors.labels(*route.whole, error_type, reason).inc()

    def route_finished(self, route: RouteLabels, times: RequestTimes) -> None:
        """The request ended with an answer: records its latencies."""
        seen = self._route(route)
        seen.duration.observe(times.total_s)
        if times.first_token_s is None:
            return
        seen.ttft.observe(times.first_token_s)
        seen.first.observe(times.first_token_s)
        generation_s = times.total_s - times.first_token_s
        seen.generation.observe(generation_s)
        if times.num_output_tokens > 1:
            per_token_s = generation_s / (times.num_output_tokens - 1)
            seen.tpot.observe(per_token_s)
            seen.token.observe(per_token_s)

    def tokens(self, route: RouteLabels, num_input: int, num_cached: int, num_output: int) -> None:
        """Tokens of one finished or broken request; cached ones are part of the input."""
        seen = self._route(route)
        seen.input += num_input
        seen.cached += num_cached
        seen.output += num_output

    def stopped_here(self, route: RouteLabels, num_tail_tokens: int) -> None:
        """A request was aborted because a stop of the gateway's own had ended all of it while the engine went on.
        num_tail_tokens: tokens that came behind the stop."""
        self._count(self._stop_aborts, 1, *route.values)
        self._count(self._stop_tails, num_tail_tokens, *route.values)

    def rate_limited(self, num_allowed: int, num_rejected: int) -> None:
        """Requests since the last call that were let in, and those that were turned away with 429."""
        self._rate_limit.labels("allowed").inc(num_allowed)
        self._rate_limit.labels("rejected").inc(num_rejected)

    def connections(self, num_open: int) -> None:
        """Connections that are open now."""
        self._http_active.set(num_open)

    def admission(self, num_admitted: int, num_waiting: int, num_rejected: int) -> None:
        """Requests that are served and that wait now, and those turned away since the last call."""
        self._admitted.set(num_admitted)
        self._admission_queue.set(num_waiting)
        self._admission_rejected.inc(num_rejected)

    def tokenizer_lookup(self, cache: str, hit: bool, num_reused: int) -> None:
        """A tokenizer cache ("l0" or "l1") was asked; UTF-8 bytes that were not encoded again."""
        self._count(self._tokenizer_lookups, 1, cache, "hit" if hit else "miss")
        self._count(self._tokenizer_reused, num_reused, cache)

    def tokenizer_evicted(self, numbers: Mapping[str, int]) -> None:
        """Texts that made room for others so far, by cache ("l0" or "l1")."""
        for cache, number in numbers.items():
            self._tokenizer_evictions.labels(cache).inc(number - self._evicted.get(cache, 0))
            self._evicted[cache] = number

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
        self._evicted: dict[str, int] = {}
        self._tokenizer_evictions = Counter(
            "smg_tokenizer_cache_evictions", "Texts that made room.", ("layer",), registry=self.registry
        )
        self._tokenizer_lookups = Counter(
            "smg_tokenizer_cache_lookups", "Texts asked for.", ("layer", "result"), registry=self.registry
        )
        self._tokenizer_reused = Counter(
            "smg_tokenizer_cache_reused_bytes", "UTF-8 bytes not encoded again.", ("layer",), registry=self.registry
        )

    def _make_http(self, buckets: tuple[float, ...]) -> None:
        registry = self.registry
        self._http_active = Gauge("smg_http_connections_active", "Connections that are open.", registry=registry)
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
        self._rate_limit = Counter(
            "smg_http_rate_limit", "Requests let in and turned away.", ("result",), registry=self.registry
        )
        self._admitted = self._gauge("smg_admission_inflight", "Requests that have a place.")
        self._admission_queue = self._gauge("smg_admission_queue_depth", "Requests that wait for a place.")
        self._admission_rejected = Counter(
            "smg_admission_queue_rejected", "Requests turned away with 429.", registry=self.registry
        )

    def _make_router(self, buckets: tuple[float, ...]) -> None:
        registry = self.registry
        self._router_requests = Counter(
            "smg_router_requests_total", "Requests routed.", (*WHOLE_LABELS, "streaming"), registry=registry
        )
        self._router_errors = Counter(
            "smg_router_request_errors_total",
            "Routed requests that ended with an error.",
            (*WHOLE_LABELS, "error_type", "reason"),
            registry=registry,
        )
        self._router_tokens = Counter(
            "smg_router_tokens_total",
            "Tokens by type: input, cached (part of input), output.",
            (*ROUTE_LABELS, "token_type"),
            registry=registry,
        )
        self._stop_aborts = Counter(
            "smg_router_local_stop_aborts", "Requests aborted by a stop of ours.", ROUTE_LABELS, registry=registry
        )
        self._stop_tails = Counter(
            "smg_router_local_stop_tail_tokens", "Tokens behind such a stop.", ROUTE_LABELS, registry=registry
        )
        self._router_duration = Histograms(
            "smg_router_request_duration_seconds", "Arrival to the last token.", WHOLE_LABELS, registry, buckets
        )
        self._of_tokens = [
            self._route_histogram("ttft", "Arrival to the first token.", buckets),
            self._route_histogram("time_to_first_token", "The same, finer.", FIRST_TOKEN_BUCKETS_S),
            self._route_histogram("generation_duration", "First to last token.", buckets),
            self._route_histogram("tpot", "Mean time between tokens after the first.", buckets),
            self._route_histogram("request_time_per_output_token", "The same, finer.", TOKEN_BUCKETS_S),
        ]

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _route_histogram(self, what: str, text: str, buckets: tuple[float, ...]) -> Histograms:
        return Histograms(f"smg_router_{what}_seconds", text, ROUTE_LABELS, self.registry, buckets)
