# SPDX-License-Identifier: MIT
"""Ports of one engine's replicas, which lie behind those of the first: none may be another's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from tokenspeed.config.flags import FlagError
from tokenspeed.config.kv_events import parse_kv_events

_KV = "--kv-events-config"


def clusters_of(raw: Mapping[str, Any], num_replicas: int) -> dict[str, range]:
    """What the engine binds at ports that the command line names, by flag (and key)."""
    found: dict[str, range] = {}
    for flag, dest in (("--rl-control-port", "rl_control_port"), ("--metrics-port", "metrics_port")):
        if raw[dest]:
            found[flag] = range(raw[dest], raw[dest] + 1)
    events = parse_kv_events(raw["kv_events_config"])
    if events.publishes:
        for key in ("endpoint", "replay_endpoint"):
            port = _tcp_port(getattr(events, key))
            if port:
                found[f"{_KV}: {key}"] = range(port, port + num_replicas)
    return found


def check_clusters(raw: Mapping[str, Any]) -> None:
    """Raise FlagError for two of them that meet."""
    if raw["data_parallel_rank"] is not None:
        return  # one replica of several: whoever starts them all has looked
    num_replicas = raw["data_parallel_size"] or 1
    for (first, ours), (second, theirs) in combinations(clusters_of(raw, num_replicas).items(), 2):
        if max(ours.start, theirs.start) < min(ours.stop, theirs.stop):
            flag, _, key = second.partition(": ")
            what = f"{key} {_told(theirs)}" if key else _told(theirs)
            raise FlagError(flag, f"{what} meets {first} {_told(ours)}, with {num_replicas} replica(s)")


def _told(ports: range) -> str:
    return f"{ports.start}" if len(ports) == 1 else f"{ports.start} to {ports.stop - 1}"


def _tcp_port(endpoint: str | None) -> int | None:
    """None of a path, or where there is none; a wrong one is told by who binds it."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return None
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isdigit() else None
