# SPDX-License-Identifier: MIT
"""What operators see of an engine and do to it: its slice of the configuration, resolved from flags. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.config.flags import FlagError
from tokenspeed.config.kv_events import KvEventsConfig, parse_kv_events, rank_endpoint

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class OperationsConfig:
    """What operators see of an engine and do to it. Ports: None for no listener, 0 for a free one."""

    served_name: str | None
    app_key: str
    metrics_host: str
    metrics_port: int | None
    control_host: str
    control_port: int | None
    control_key: str | None
    weight_version: str
    kv_events: KvEventsConfig
    """Addresses are this rank's own."""
    traces_endpoint: str | None
    """host:port of the collector of spans (OTLP by gRPC); None for none."""
    marks_steps: bool
    """Whether steps are NVTX ranges."""
    memory_saver: bool
    """Whether the memory of weights and KV blocks can be given back while the engine stands still."""


def operations_of(raw: Mapping[str, Any]) -> OperationsConfig:
    """`raw` is `ParsedFlags.values`. Raises FlagError."""
    port = _port(raw, "metrics_port")
    if port is None and raw["enable_metrics"]:
        port = 0
    if raw["rl_control_host"] not in _LOOPBACK and raw["rl_control_api_key"] is None:
        raise FlagError("--rl-control-host", f"{raw['rl_control_host']} is open to others: give --rl-control-api-key")
    return OperationsConfig(
        served_name=raw["served_model_name"],
        app_key=raw["app_key"] or "",
        metrics_host=raw["metrics_host"],
        metrics_port=port,
        control_host=raw["rl_control_host"],
        control_port=_port(raw, "rl_control_port"),
        control_key=raw["rl_control_api_key"],
        weight_version=raw["weight_version"],
        kv_events=_kv_events(raw),
        traces_endpoint=_traces_endpoint(raw),
        marks_steps=raw["enable_nvtx"],
        memory_saver=raw["enable_memory_saver"],
    )


def _traces_endpoint(raw: Mapping[str, Any]) -> str | None:
    endpoint: str = raw["otlp_traces_endpoint"]
    if not raw["enable_trace"]:
        return None
    if ":" not in endpoint:
        raise FlagError("--otlp-traces-endpoint", f"{endpoint!r} is not host:port")
    return endpoint


def _kv_events(raw: Mapping[str, Any]) -> KvEventsConfig:
    config = parse_kv_events(raw["kv_events_config"])
    if not config.publishes:
        return config
    rank, replay = raw["zmq_engine_index"], config.replay_endpoint
    if not raw["enable_prefix_caching"]:
        raise FlagError("--kv-events-config", "without prefix caching there is nothing to publish")
    return msgspec.structs.replace(
        config,
        endpoint=rank_endpoint(config.endpoint, rank),
        replay_endpoint=None if replay is None else rank_endpoint(replay, rank),
    )


def _port(raw: Mapping[str, Any], dest: str) -> int | None:
    port = raw[dest]
    if port is not None and not 0 <= port <= 65535:
        raise FlagError("--" + dest.replace("_", "-"), f"{port} is not in [0, 65535]")
    return None if port is None else int(port)
