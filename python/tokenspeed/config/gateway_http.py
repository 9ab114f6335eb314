# SPDX-License-Identifier: MIT
"""The gateway's settings of connections, traces and the tokenizer's cache: flags and what they come to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import Flag, FlagError
from tokenspeed.config.flags_rows import flag as _flag


@dataclass(frozen=True)
class ConnectionConfig:
    """What a connection may do."""

    max_connections: int
    """Open at once; 0: as many as the process may have files, less 128."""
    header_timeout_s: float
    """From the first byte of a request to the end of its head; 0: no limit."""
    stall_s: float
    """A client that sends or takes nothing of a body for this long has left; 0: no limit."""
    cors_origins: tuple[str, ...]
    """Origins whose pages may ask; "*" is any."""


@dataclass(frozen=True)
class TraceConfig:
    """Where spans go: host:port of an OTLP collector (gRPC), None for nowhere."""

    endpoint: str | None


@dataclass(frozen=True)
class TokenizerCacheConfig:
    """Sizes in bytes of memory; 0: that cache is off."""

    exact_entries: int
    exact_bytes: int
    prefix_bytes: int


_HTTP, _LIMITS, _LOGS, _MODEL = "HTTP", "Limits", "Logs and metrics", "Model"

HTTP_FLAGS: tuple[Flag, ...] = (
    _flag("--max-connections", "int", 0, _LIMITS, "connections at once; more get 503; 0: as many as files, but 128"),
    _flag("--header-read-timeout-secs", "float", 30.0, _LIMITS, "longest time for the head of a request; 0: no limit"),
    _flag(
        "--stream-body-stall-timeout-secs",
        "float",
        300.0,
        _LIMITS,
        "a client that sends or takes nothing for this long has left; 0: no limit",
    ),
    _flag("--cors-allowed-origins", "append", (), _HTTP, "origins whose pages may ask, or *"),
    _flag("--enable-trace", "switch", False, _LOGS, "send a span of every request to an OTLP collector"),
    _flag("--otlp-traces-endpoint", "str", "localhost:4317", _LOGS, "host:port of the collector (gRPC)"),
    _flag("--keep-reasoning", "switch", False, _MODEL, "prompts keep the reasoning of earlier turns"),
    _flag("--tokenizer-cache-enable-l0", "switch", False, _MODEL, "remember the tokens of whole texts"),
    _flag("--tokenizer-cache-l0-max-entries", "int", 10000, _MODEL, "texts remembered at most"),
    _flag("--tokenizer-cache-l0-max-memory", "int", 268435456, _MODEL, "bytes they take at most"),
    _flag("--tokenizer-cache-enable-l1", "switch", False, _MODEL, "remember the tokens of texts' pieces"),
    _flag("--tokenizer-cache-l1-max-memory", "int", 52428800, _MODEL, "bytes they take at most"),
)

HTTP_LISTS = frozenset({"--cors-allowed-origins"})

HTTP_RANGES: tuple[tuple[str, float, float], ...] = (
    ("--max-connections", 0, 2**31),
    ("--header-read-timeout-secs", 0, 1e9),
    ("--stream-body-stall-timeout-secs", 0, 1e9),
    ("--tokenizer-cache-l0-max-entries", 1, 2**31),
    ("--tokenizer-cache-l0-max-memory", 1, 2**40),
    ("--tokenizer-cache-l1-max-memory", 1, 2**40),
)


def connection_config(values: dict[str, Any]) -> ConnectionConfig:
    """Raises `FlagError`."""
    origins = tuple(origin.rstrip("/") for origin in values["cors_allowed_origins"])
    for origin in origins:
        if origin != "*" and "://" not in origin:
            raise FlagError("--cors-allowed-origins", f"{origin!r} is no origin such as https://example.org, and not *")
    return ConnectionConfig(
        max_connections=values["max_connections"],
        header_timeout_s=values["header_read_timeout_secs"],
        stall_s=values["stream_body_stall_timeout_secs"],
        cors_origins=origins,
    )


def trace_config(values: dict[str, Any]) -> TraceConfig:
    """Raises `FlagError`."""
    endpoint = values["otlp_traces_endpoint"]
    if not values["enable_trace"]:
        return TraceConfig(None)
    if ":" not in endpoint:
        raise FlagError("--otlp-traces-endpoint", f"{endpoint!r} is not host:port")
    return TraceConfig(endpoint)


def tokenizer_cache_config(values: dict[str, Any]) -> TokenizerCacheConfig:
    """Caches that were not asked for have no bytes."""
    return TokenizerCacheConfig(
        exact_entries=values["tokenizer_cache_l0_max_entries"],
        exact_bytes=values["tokenizer_cache_l0_max_memory"] if values["tokenizer_cache_enable_l0"] else 0,
        prefix_bytes=values["tokenizer_cache_l1_max_memory"] if values["tokenizer_cache_enable_l1"] else 0,
    )
