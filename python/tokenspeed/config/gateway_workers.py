# SPDX-License-Identifier: MIT
"""The gateway's settings of how workers are reached and watched: flags and what they come to. Reads only the files of
certificates and keys that flags name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.config.flags import Flag, FlagError
from tokenspeed.config.flags_rows import flag as _flag

GRPC_SCHEMES = ("grpc://", "grpcs://")


def over_grpc(url: str) -> bool:
    """Whether a worker URL is dialled over gRPC; the engines of any other dial the gateway."""
    return url.startswith(GRPC_SCHEMES)


@dataclass(frozen=True, repr=False)
class GrpcTls:
    """For `grpcs://` workers, all PEM: `ca` None trusts the system's; `cert` and `key` are this gateway's own."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


@dataclass(frozen=True)
class GrpcConfig:
    """How workers behind gRPC are called."""

    request_timeout_s: float = 0.0
    """From a request's dispatch to its last message; 0: no limit but the request's own."""
    load_interval_s: float = 1.0
    """How often an engine is asked for its load; 0: never."""
    health_interval_s: float = 60.0
    """How often it is asked for its health; 0: never."""
    health_timeout_s: float = 5.0
    failures: int = 3
    """So many checks in a row that fail make a worker lost."""
    successes: int = 2
    """And so many that succeed bring it back."""
    startup_delay_s: float = 0.0
    """Before the first call."""
    startup_interval_s: float = 0.5
    """Between attempts to register."""
    startup_timeout_s: float = 0.0
    """A worker that has not registered by then is given up; 0: none ever is."""
    tls: GrpcTls = GrpcTls(None, None, None)


@dataclass(frozen=True)
class UpkeepConfig:
    """What becomes of workers that leave."""

    remove_unhealthy: bool
    """A worker that is lost is removed; otherwise it is waited for."""
    drain_settle_s: float
    """A worker that is deleted drains for at least this long."""


_WORKERS, _HEALTH, _LIMITS, _SECURITY = "Workers", "Health", "Limits", "Security"

WORKER_FLAGS: tuple[Flag, ...] = (
    _flag("--worker-startup-delay", "float", 0.0, _WORKERS, "gRPC: seconds before a worker is called first"),
    _flag("--worker-startup-check-interval", "float", 0.5, _WORKERS, "gRPC: seconds between attempts to register"),
    _flag(
        "--worker-startup-timeout-secs",
        "float",
        0.0,
        _WORKERS,
        "gRPC: a worker that has not registered by then is given up; 0: none is",
    ),
    _flag(
        "--dp-minimum-tokens-scheduler", "switch", False, _WORKERS, "of a worker's ranks, that with the fewest tokens"
    ),
    _flag("--load-monitor-interval", "float", 1.0, _HEALTH, "gRPC: how often engines are asked for their load"),
    _flag("--engine-metrics", "switch", False, _HEALTH, "gRPC: ask also with --disable-load-monitoring"),
    _flag(
        "--disable-load-monitoring",
        "switch",
        False,
        _HEALTH,
        "gRPC: do not ask for loads unless the policy or the overload protection looks at them",
    ),
    _flag("--health-check-interval-secs", "float", 60.0, _HEALTH, "gRPC: how often engines are asked for their health"),
    _flag("--health-check-timeout-secs", "float", 5.0, _HEALTH, "gRPC: longest wait for that answer"),
    _flag("--health-failure-threshold", "int", 3, _HEALTH, "gRPC: failed checks in a row that make a worker lost"),
    _flag("--health-success-threshold", "int", 2, _HEALTH, "gRPC: good ones in a row that bring it back"),
    _flag("--disable-health-check", "switch", False, _HEALTH, "gRPC: do not ask; a lost connection is still seen"),
    _flag(
        "--remove-unhealthy-workers --worker-auto-recovery",
        "bool",
        None,
        _HEALTH,
        "remove a worker that is lost, instead of waiting for it",
    ),
    _flag("--drain-settle-secs", "float", 0.0, _HEALTH, "a deleted worker drains for at least this long"),
    _flag(
        "--grpc-request-timeout-secs", "float", 0.0, _LIMITS, "gRPC: longest call of a worker; then 504; 0: no limit"
    ),
    _flag("--ca-cert-paths", "append", (), _SECURITY, "grpcs workers: files of CA certificates; default: the system's"),
    _flag("--client-cert-path", "str", None, _SECURITY, "grpcs workers: this gateway's certificate chain"),
    _flag("--client-key-path", "str", None, _SECURITY, "grpcs workers: its private key"),
)

WORKER_LISTS = frozenset({"--ca-cert-paths"})

WORKER_RANGES: tuple[tuple[str, float, float], ...] = (
    ("--worker-startup-delay", 0, 1e9),
    ("--worker-startup-check-interval", 0.01, 1e9),
    ("--worker-startup-timeout-secs", 0, 1e9),
    ("--load-monitor-interval", 0.01, 1e9),
    ("--health-check-interval-secs", 0.01, 1e9),
    ("--health-check-timeout-secs", 0.01, 1e9),
    ("--health-failure-threshold", 1, 1_000_000),
    ("--health-success-threshold", 1, 1_000_000),
    ("--drain-settle-secs", 0, 1e9),
    ("--grpc-request-timeout-secs", 0, 1e9),
)


def grpc_config(values: dict[str, Any], loads_matter: bool) -> GrpcConfig:
    """The slice of the parsed flags. loads_matter: routing looks at what engines say of their load. Raises
    `FlagError`."""
    asks = loads_matter or values["engine_metrics"] or not values["disable_load_monitoring"]
    return GrpcConfig(
        request_timeout_s=values["grpc_request_timeout_secs"],
        load_interval_s=values["load_monitor_interval"] if asks else 0.0,
        health_interval_s=0.0 if values["disable_health_check"] else values["health_check_interval_secs"],
        health_timeout_s=values["health_check_timeout_secs"],
        failures=values["health_failure_threshold"],
        successes=values["health_success_threshold"],
        startup_delay_s=values["worker_startup_delay"],
        startup_interval_s=values["worker_startup_check_interval"],
        startup_timeout_s=values["worker_startup_timeout_secs"],
        tls=_tls(values),
    )


def upkeep_config(values: dict[str, Any]) -> UpkeepConfig:
    """The slice of the parsed flags."""
    return UpkeepConfig(bool(values["remove_unhealthy_workers"]), values["drain_settle_secs"])


def _tls(values: dict[str, Any]) -> GrpcTls:
    cert, key, cas = values["client_cert_path"], values["client_key_path"], values["ca_cert_paths"]
    if (cert is None) != (key is None):
        raise FlagError("--client-cert-path", "the certificate and its key (--client-key-path) go together")
    return GrpcTls(
        ca=_pem("--ca-cert-paths", cas) if cas else None,
        cert=None if cert is None else _pem("--client-cert-path", [cert]),
        key=None if key is None else _pem("--client-key-path", [key]),
    )


def _pem(name: str, paths: Sequence[str]) -> bytes:
    parts = []
    for path in paths:
        try:
            part = Path(path).read_bytes()
        except OSError as error:
            raise FlagError(name, f"{path} cannot be read: {error.strerror}") from None
        if b"-----BEGIN " not in part:
            raise FlagError(name, f"{path} is no PEM file")
        parts.append(part.rstrip() + b"\n")
    return b"".join(parts)
