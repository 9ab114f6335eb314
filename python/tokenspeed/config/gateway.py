# SPDX-License-Identifier: MIT
"""The gateway's settings: from the command line of `smg launch` to one frozen `GatewayConfig`.

Pure: reads files only where a flag names one that holds a secret. Every flag of the released gateway is either
honoured (`HONOURED` here) or refused with a reason (`gateway_refused`); an unknown flag, a refused one, or a bad
value raises `FlagError`, which the command turns into one line on stderr and exit status 2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.config.curve import GatewayCurve, gateway_curve
from tokenspeed.config.flags import Flag, FlagError, json_object, parse_flags
from tokenspeed.config.flags_help import help_text
from tokenspeed.config.flags_rows import flag as _flag
from tokenspeed.config.gateway_history import HISTORY_FLAGS, HISTORY_RANGES, HistoryConfig, history_config
from tokenspeed.config.gateway_http import (
    HTTP_FLAGS,
    HTTP_LISTS,
    HTTP_RANGES,
    ConnectionConfig,
    TokenizerCacheConfig,
    TraceConfig,
    connection_config,
    tokenizer_cache_config,
    trace_config,
)
from tokenspeed.config.gateway_listeners import (
    LISTENER_FLAGS,
    LISTENER_LISTS,
    LISTENER_RANGES,
    ListenerConfig,
    LogConfig,
    listener_config,
    log_config,
)
from tokenspeed.config.gateway_priorities import PRIORITY_FLAGS, PriorityConfig, priority_config
from tokenspeed.config.gateway_refused import REFUSED
from tokenspeed.config.gateway_routing import (
    ROUTING_FLAGS,
    ROUTING_LISTS,
    ROUTING_RANGES,
    RoutingConfig,
    routing_config,
)
from tokenspeed.config.gateway_workers import (
    WORKER_FLAGS,
    WORKER_LISTS,
    WORKER_RANGES,
    GrpcConfig,
    UpkeepConfig,
    grpc_config,
    upkeep_config,
)
from tokenspeed.config.member import Member
from tokenspeed.config.sampling import preferred_params

_OWN_LISTS = frozenset({"--worker-urls", "--request-id-headers", "--prometheus-duration-buckets", "--model-alias"})
_LISTS = _OWN_LISTS | HTTP_LISTS | ROUTING_LISTS | WORKER_LISTS | LISTENER_LISTS


@dataclass(frozen=True)
class RetryConfig:
    """When a request is sent to an engine again; `max_attempts` counts the first one too."""

    max_attempts: int
    initial_backoff_s: float
    max_backoff_s: float
    multiplier: float
    jitter: float


@dataclass(frozen=True)
class BreakerConfig:
    """When a worker that fails gets no requests. `failures` in a row within `window_s` (0: never), for `open_s`, until
    `successes` in a row."""

    failures: int
    window_s: float
    open_s: float
    successes: int


@dataclass(frozen=True)
class LimitConfig:
    """What one gateway takes at once. `max_concurrent_requests` 0: no limit."""

    max_concurrent_requests: int
    queue_size: int
    queue_timeout_s: float
    request_timeout_s: float
    max_payload_bytes: int
    idle_connection_timeout_s: float
    requests_per_s: float
    """That may come for long; 0: any number. As many at once as may be served at once."""


@dataclass(frozen=True)
class DrainConfig:
    """After SIGTERM: requests are still taken for `settle_s`, then those in flight have `grace_s` to finish."""

    settle_s: float
    grace_s: float


@dataclass(frozen=True)
class GatewayConfig:
    """Everything `tokenspeed.gateway.app.run` needs."""

    host: str
    port: int
    worker_urls: tuple[str, ...]
    routing: RoutingConfig
    model_path: str | None
    """A folder, a GGUF file or a hub id: where the tokenizer and the chat template come from, and a name."""
    model_aliases: tuple[str, ...]
    tokenizer_path: str | None
    preferred_sampling: Mapping[str, Any]
    """Parameters of requests that do not say them, before the model's own defaults."""
    chat_template: str | None
    """What replaces the model's own template: a file, or a name of `gateway.text.builtin_templates`."""
    reasoning_parser: str
    tool_call_parser: str
    """Names of `gateway.text.parse.names`; "auto" by the template, "none" for no parser."""
    api_keys: tuple[str, ...]
    tls_cert: str | None
    tls_key: str | None
    curve: GatewayCurve | None
    """Keys of the lanes; None: they are not encrypted."""
    engine_count: int | None
    engine_startup_timeout_s: float
    stall_s: float
    """An engine that has had work and said nothing for this long counts as stuck."""
    grpc: GrpcConfig
    upkeep: UpkeepConfig
    by_tokens: bool
    """Of a worker's ranks the one with the fewest tokens is next, not the one with the fewest requests."""
    sse_keepalive_s: float
    """0: no comments on silent streams."""
    request_id_headers: tuple[str, ...]
    prometheus_host: str | None
    prometheus_port: int | None
    """A second listener for /metrics alone; None: /metrics on the main port only."""
    duration_buckets_s: tuple[float, ...]
    listeners: ListenerConfig
    logs: LogConfig
    retry: RetryConfig
    breaker: BreakerConfig
    limits: LimitConfig
    priorities: PriorityConfig | None
    """None: first come, first served."""
    drain: DrainConfig
    history: HistoryConfig
    connections: ConnectionConfig
    traces: TraceConfig
    tokenizer_cache: TokenizerCacheConfig
    keep_reasoning: bool
    """Prompts keep the reasoning of earlier turns."""
    num_gateways: int
    """Processes on the port; more than one have a process in front (`gateway.several`)."""
    member: Member | None = None
    """Which of several this process is; None: it is alone, or in front."""


_WORKERS, _ROUTING, _MODEL, _HTTP, _LIMITS = "Workers", "Routing", "Model", "HTTP", "Limits"
_RETRIES, _HEALTH, _LOGS, _SECURITY = "Retries", "Health", "Logs and metrics", "Security"

HONOURED: tuple[Flag, ...] = (
    _flag("--host", "str", "0.0.0.0", _HTTP, "address to listen on"),
    _flag("--port", "int", 30000, _HTTP, "port to listen on; 0 takes a free one"),
    _flag("--gateway-workers", "int", 1, _HTTP, "gateway processes that share the port and its workers"),
    _flag(
        "--worker-urls",
        "append",
        (),
        _WORKERS,
        "of each worker: ipc:///path or tcp://host:port (a lane), grpc://host:port, or grpcs:// with TLS",
    ),
    _flag("--backend --runtime", "str", "tokenspeed", _WORKERS, "kind of the workers", ("tokenspeed",)),
    _flag("--zmq-engine-count", "int", None, _WORKERS, "ranks behind a worker URL; default: what the first one says"),
    _flag("--zmq-startup-timeout-secs", "float", 3600.0, _WORKERS, "time for all ranks to register after the first"),
    *ROUTING_FLAGS,
    *WORKER_FLAGS,
    *LISTENER_FLAGS,
    _flag("--model-path --model", "str", None, _MODEL, "folder, GGUF file or hub id; default: the embedded model"),
    _flag("--model-alias", "append", (), _MODEL, "another name that requests may use for the model"),
    _flag(
        "--preferred-sampling-params",
        "str",
        None,
        _MODEL,
        "JSON object of sampling parameters for requests that do not say them",
    ),
    _flag("--tokenizer-path", "str", None, _MODEL, "folder or file of the tokenizer, if not the model's"),
    _flag("--chat-template", "str", None, _MODEL, "file with a Jinja chat template, or a family's name such as chatml"),
    _flag("--reasoning-parser", "str", "auto", _MODEL, "how reasoning is told apart; auto: by the template; none"),
    _flag("--tool-call-parser", "str", "auto", _MODEL, "how tool calls are read; auto: by the template; none"),
    _flag("--max-payload-size", "int", 536870912, _LIMITS, "largest body in bytes; larger ones get 413"),
    _flag("--max-concurrent-requests", "int", -1, _LIMITS, "requests served at once; -1: max(4096, 1024 x cores)"),
    _flag("--queue-size", "int", 100, _LIMITS, "requests that may wait for a place; more get 429"),
    _flag("--queue-timeout-secs", "float", 60.0, _LIMITS, "longest wait for a place; then 429"),
    _flag("--rate-limit-tokens-per-second", "float", None, _LIMITS, "requests a second in the long run; more get 429"),
    _flag("--request-timeout-secs", "float", 1800.0, _LIMITS, "longest life of a request"),
    _flag("--idle-connection-timeout-secs", "float", 90.0, _LIMITS, "idle connections are closed after this"),
    _flag("--sse-keepalive-secs", "float", 15.0, _HTTP, "comment on a stream that was silent this long; 0: none"),
    _flag("--request-id-headers", "append", (), _HTTP, "headers that name a request, before x-request-id"),
    _flag("--shutdown-settle-secs", "float", 0.0, _HTTP, "after SIGTERM, requests are still taken for this long"),
    _flag("--shutdown-grace-period-secs", "float", 180.0, _HTTP, "after that, those in flight may finish this long"),
    _flag("--retry-max-retries", "int", 5, _RETRIES, "attempts in all, the first one included"),
    _flag("--retry-initial-backoff-ms", "float", 50.0, _RETRIES, "pause after the first attempt"),
    _flag("--retry-max-backoff-ms", "float", 30000.0, _RETRIES, "longest pause"),
    _flag("--retry-backoff-multiplier", "float", 1.5, _RETRIES, "growth of the pause"),
    _flag("--retry-jitter-factor", "float", 0.2, _RETRIES, "share of a pause by which it varies"),
    _flag("--disable-retries", "switch", False, _RETRIES, "one attempt only"),
    _flag("--cb-failure-threshold", "int", 10, _RETRIES, "failures in a row that take a worker out of use"),
    _flag("--cb-window-duration-secs", "float", 120.0, _RETRIES, "time in which they must fall"),
    _flag("--cb-timeout-duration-secs", "float", 60.0, _RETRIES, "how long until the worker is tried again"),
    _flag("--cb-success-threshold", "int", 3, _RETRIES, "successes in a row that bring it back"),
    _flag("--disable-circuit-breaker", "switch", False, _RETRIES, "failures never take a worker out of use"),
    _flag("--worker-stale-secs", "float", 30.0, _HEALTH, "a worker with work and no sign of life this long is stuck"),
    _flag("--prometheus-port", "int", None, _LOGS, "also serve /metrics alone on this port"),
    _flag("--prometheus-host", "str", None, _LOGS, "address for that port; default: --host"),
    _flag("--prometheus-duration-buckets", "append", (), _LOGS, "upper bounds in seconds of duration histograms"),
    _flag("--api-key", "append", (), _SECURITY, "key that requests must carry; repeatable"),
    _flag("--api-key-file", "str", None, _SECURITY, "file with one key a line"),
    _flag("--zmq-curve-secret-key-file", "str", None, _SECURITY, "the gateway's CURVE secret key; encrypts every lane"),
    _flag(
        "--zmq-curve-peer-keys-file", "str", None, _SECURITY, "CURVE public keys of engines that may dial, one a line"
    ),
    _flag("--tls-cert-path", "str", None, _SECURITY, "certificate chain of the server"),
    _flag("--tls-key-path", "str", None, _SECURITY, "its private key"),
    *PRIORITY_FLAGS,
    *HTTP_FLAGS,
    *HISTORY_FLAGS,
)

TABLE: tuple[Flag, ...] = HONOURED + REFUSED


def launch_help() -> str:
    """The text of `smg launch --help`: the honoured flags."""
    return help_text(sorted(HONOURED, key=lambda flag: flag.group))


def parse_launch(argv: Sequence[str]) -> GatewayConfig:
    """The settings that `argv` (after `smg launch`) asks for. Raises `FlagError`."""
    parsed = parse_flags(_one_value_each(argv), TABLE)
    if parsed.rest:
        raise FlagError(parsed.rest[0], "no such flag (see `smg launch --help`)")
    if parsed.given.get("model") == "MODEL":
        raise FlagError(str(parsed.values["model"]), "unexpected word; the model is given by --model-path")
    return _resolve(parsed.values)


def _one_value_each(argv: Sequence[str]) -> list[str]:
    """`--worker-urls a b` as `--worker-urls a --worker-urls b`."""
    words: list[str] = []
    current = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            current = name if name in _LISTS else ""
            if current and not equals:
                continue
        elif current:
            words.append(current)
        words.append(word)
    return words


def _resolve(values: dict[str, Any]) -> GatewayConfig:
    _check_ranges(values)
    concurrent = values["max_concurrent_requests"]
    limit = max(4096, 1024 * (os.cpu_count() or 1)) if concurrent < 0 else concurrent
    return GatewayConfig(
        host=values["host"],
        port=values["port"],
        worker_urls=tuple(values["worker_urls"]),
        routing=routing_config(values),
        model_path=values["model_path"],
        model_aliases=tuple(values["model_alias"]),
        tokenizer_path=values["tokenizer_path"],
        preferred_sampling=preferred_params(json_object(values, "preferred_sampling_params")),
        chat_template=values["chat_template"],
        reasoning_parser=values["reasoning_parser"],
        tool_call_parser=values["tool_call_parser"],
        api_keys=tuple(values["api_key"]) + _keys_of(values["api_key_file"]),
        tls_cert=values["tls_cert_path"],
        tls_key=values["tls_key_path"],
        curve=gateway_curve(values["zmq_curve_secret_key_file"], values["zmq_curve_peer_keys_file"]),
        engine_count=values["zmq_engine_count"],
        engine_startup_timeout_s=values["zmq_startup_timeout_secs"],
        stall_s=values["worker_stale_secs"],
        grpc=grpc_config(values, loads_matter=_looks_at_loads(values)),
        upkeep=upkeep_config(values),
        by_tokens=values["dp_minimum_tokens_scheduler"],
        sse_keepalive_s=values["sse_keepalive_secs"],
        request_id_headers=tuple(values["request_id_headers"]),
        prometheus_host=values["prometheus_host"],
        prometheus_port=values["prometheus_port"],
        duration_buckets_s=_numbers("--prometheus-duration-buckets", values["prometheus_duration_buckets"]),
        listeners=listener_config(values),
        logs=log_config(values),
        retry=_retry(values),
        breaker=BreakerConfig(
            failures=0 if values["disable_circuit_breaker"] else values["cb_failure_threshold"],
            window_s=values["cb_window_duration_secs"],
            open_s=values["cb_timeout_duration_secs"],
            successes=values["cb_success_threshold"],
        ),
        limits=LimitConfig(
            max_concurrent_requests=limit,
            queue_size=values["queue_size"],
            queue_timeout_s=values["queue_timeout_secs"],
            request_timeout_s=values["request_timeout_secs"],
            max_payload_bytes=values["max_payload_size"],
            idle_connection_timeout_s=values["idle_connection_timeout_secs"],
            requests_per_s=values["rate_limit_tokens_per_second"] or 0.0,
        ),
        priorities=priority_config(values, limit),
        drain=DrainConfig(values["shutdown_settle_secs"], values["shutdown_grace_period_secs"]),
        history=history_config(values),
        connections=connection_config(values),
        traces=trace_config(values),
        tokenizer_cache=tokenizer_cache_config(values),
        keep_reasoning=values["keep_reasoning"],
        num_gateways=values["gateway_workers"],
    )


def _looks_at_loads(values: dict[str, Any]) -> bool:
    by_load = values["policy"] in ("cache_aware", "least_load", "power_of_two")
    return by_load or values["dp_minimum_tokens_scheduler"] or not values["disable_worker_overload_protection"]


def _retry(values: dict[str, Any]) -> RetryConfig:
    return RetryConfig(
        max_attempts=1 if values["disable_retries"] else max(1, values["retry_max_retries"]),
        initial_backoff_s=values["retry_initial_backoff_ms"] / 1000,
        max_backoff_s=values["retry_max_backoff_ms"] / 1000,
        multiplier=values["retry_backoff_multiplier"],
        jitter=values["retry_jitter_factor"],
    )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("--port", 0, 65535),
    ("--gateway-workers", 1, 256),
    ("--zmq-engine-count", 1, 65535),
    ("--zmq-startup-timeout-secs", 0.001, 1e9),
    ("--max-payload-size", 1, 2**40),
    ("--max-concurrent-requests", -1, 2**31),
    ("--queue-size", 0, 2**31),
    ("--queue-timeout-secs", 0, 1e9),
    ("--rate-limit-tokens-per-second", 0, 1e9),
    ("--request-timeout-secs", 0.001, 1e9),
    ("--idle-connection-timeout-secs", 0, 1e9),
    ("--sse-keepalive-secs", 0, 1e9),
    ("--shutdown-settle-secs", 0, 1e9),
    ("--shutdown-grace-period-secs", 0, 1e9),
    ("--retry-max-retries", 0, 1000),
    ("--retry-initial-backoff-ms", 0, 1e9),
    ("--retry-max-backoff-ms", 0, 1e9),
    ("--retry-backoff-multiplier", 1, 1000),
    ("--retry-jitter-factor", 0, 1),
    ("--cb-failure-threshold", 1, 1_000_000),
    ("--cb-window-duration-secs", 0.001, 1e9),
    ("--cb-timeout-duration-secs", 0, 1e9),
    ("--cb-success-threshold", 1, 1_000_000),
    ("--worker-stale-secs", 0.001, 1e9),
    ("--prometheus-port", 0, 65535),
    *HISTORY_RANGES,
    *HTTP_RANGES,
    *ROUTING_RANGES,
    *WORKER_RANGES,
    *LISTENER_RANGES,
)


def _check_ranges(values: dict[str, Any]) -> None:
    for name, low, high in _RANGES:
        value = values[name[2:].replace("-", "_")]
        if value is not None and not low <= value <= high:
            raise FlagError(name, f"must be in [{low:g}, {high:g}], got {value}")
    if not values["worker_urls"]:
        raise FlagError("--worker-urls", "at least one worker is needed")
    if (values["tls_cert_path"] is None) != (values["tls_key_path"] is None):
        raise FlagError("--tls-cert-path", "the certificate and its key (--tls-key-path) go together")


def _keys_of(file: str | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FlagError("--api-key-file", f"{file} cannot be read: {error.strerror}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise FlagError("--api-key-file", f"{file} has no key")
    return keys


def _numbers(name: str, words: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(sorted(float(word) for word in words))
    except ValueError:
        raise FlagError(name, f"{' '.join(words)!r} are not numbers") from None
