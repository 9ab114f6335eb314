# SPDX-License-Identifier: MIT
"""The gateway's settings of how a worker is chosen: flags and what they come to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import Flag
from tokenspeed.config.flags_rows import Rows
from tokenspeed.config.gateway_balance import (
    BALANCE_FLAGS,
    BALANCE_LISTS,
    BALANCE_RANGES,
    CacheAwareConfig,
    LoadPrices,
    cache_aware_config,
    load_prices,
)

POLICY_NAMES = (
    "random",
    "round_robin",
    "passthrough",
    "cache_aware",
    "power_of_two",
    "least_load",
    "manual",
    "consistent_hashing",
    "prefix_hash",
    "bucket",
)
ASSIGNMENT_MODES = ("random", "min_load", "min_group")
LOAD_METRICS = ("expected_wait", "requests", "least_requests")


@dataclass(frozen=True)
class OverloadConfig:
    """When a worker is passed by, by what its engine says of itself; nothing is ever passed by where `protects` is
    false. `sheds`: where all are overloaded, requests get 503 instead of a worker."""

    protects: bool
    waiting_requests: int
    token_usage: float
    sheds: bool


@dataclass(frozen=True)
class RoutingConfig:
    """How a worker is chosen. `policy` is one of `POLICY_NAMES`; the rest belongs to single policies. "abs" counts
    requests above the mean of all workers, "factor" is a multiple of that mean."""

    policy: str
    cache: CacheAwareConfig
    prices: LoadPrices
    prefix_tokens: int
    prefix_hash_load_factor: float
    prefix_hash_abs_threshold: float
    sticky_idle_s: float
    assignment_mode: str
    """One of `ASSIGNMENT_MODES`."""
    load_metric: str
    """One of `LOAD_METRICS`."""
    bucket_interval_s: float
    key_headers: tuple[str, ...]
    """Headers that give a routing key, before x-smg-routing-key."""
    sticky: bool
    """Requests with a routing key stay with their worker, whatever the policy."""
    stall_s: float
    """A worker with work and no sign of life for this long gets requests only where no other can take them."""
    wedge_s: float
    """And one that gave no token for this long while requests pile up, beyond the time that their prompts may need."""
    overload: OverloadConfig


_flag = Rows("Routing")

ROUTING_FLAGS: tuple[Flag, ...] = (
    _flag("--policy", "str", "cache_aware", "how a worker is chosen", POLICY_NAMES),
    *BALANCE_FLAGS,
    _flag("--prefix-token-count", "int", 256, "prefix_hash: tokens that are hashed"),
    _flag("--prefix-hash-load-factor", "float", 1.25, "prefix_hash: multiple of the mean to pass a worker by"),
    _flag("--prefix-hash-balance-abs-threshold", "float", 10.0, "prefix_hash: and requests above the mean"),
    _flag("--max-idle-secs --sticky-key-idle-secs", "float", 14400.0, "manual: a key unused so long is free"),
    _flag("--assignment-mode", "str", "min_load", "manual: worker of a new key", ASSIGNMENT_MODES),
    _flag("--dp-aware", "switch", False, "each request goes to the idlest rank; that is always so"),
    _flag("--power-of-two-load-metric", "str", "expected_wait", "power_of_two: what is compared", LOAD_METRICS),
    _flag("--bucket-adjust-interval-secs", "float", 5.0, "bucket: how often prompt lengths are divided anew"),
    _flag("--routing-key-headers", "append", (), "headers with a routing key, before x-smg-routing-key"),
    _flag("--routing-key-override --sticky-sessions", "switch", False, "a routing key keeps its worker on any policy"),
    _flag("--worker-stall-secs", "float", 2.0, "a worker with work that is silent so long is avoided"),
    _flag("--worker-wedge-secs", "float", 3.0, "and one without a token for so long while requests pile up"),
    _flag("--worker-overload-waiting-requests", "int", 8, "a worker whose engine queues so many is avoided"),
    _flag("--worker-overload-token-usage", "float", 0.8, "and one whose running requests hold this share of its KV"),
    _flag("--worker-overload-protection", "switch", False, "avoid overloaded workers; that is so by itself"),
    _flag("--disable-worker-overload-protection", "switch", False, "do not look at what engines say of their load"),
    _flag("--worker-overload-shed", "switch", False, "503 where all workers are overloaded"),
)

ROUTING_LISTS = frozenset({"--routing-key-headers"}) | BALANCE_LISTS

ROUTING_RANGES: tuple[tuple[str, float, float], ...] = (
    *BALANCE_RANGES,
    ("--prefix-token-count", 1, 2**31),
    ("--prefix-hash-load-factor", 1, 1e9),
    ("--prefix-hash-balance-abs-threshold", 0, 1e9),
    ("--max-idle-secs", 0, 1e9),
    ("--bucket-adjust-interval-secs", 0.001, 1e9),
    ("--worker-stall-secs", 0.001, 1e9),
    ("--worker-wedge-secs", 0.001, 1e9),
    ("--worker-overload-waiting-requests", 1, 2**31),
    ("--worker-overload-token-usage", 0.001, 1),
)


def routing_config(values: dict[str, Any]) -> RoutingConfig:
    """The slice of the parsed flags. Raises `FlagError`."""
    return RoutingConfig(
        policy=values["policy"],
        cache=cache_aware_config(values),
        prices=load_prices(values),
        prefix_tokens=values["prefix_token_count"],
        prefix_hash_load_factor=values["prefix_hash_load_factor"],
        prefix_hash_abs_threshold=values["prefix_hash_balance_abs_threshold"],
        sticky_idle_s=values["max_idle_secs"],
        assignment_mode=values["assignment_mode"],
        load_metric=values["power_of_two_load_metric"],
        bucket_interval_s=values["bucket_adjust_interval_secs"],
        key_headers=tuple(values["routing_key_headers"]),
        sticky=values["routing_key_override"],
        stall_s=values["worker_stall_secs"],
        wedge_s=values["worker_wedge_secs"],
        overload=OverloadConfig(
            protects=not values["disable_worker_overload_protection"],
            waiting_requests=values["worker_overload_waiting_requests"],
            token_usage=values["worker_overload_token_usage"],
            sheds=values["worker_overload_shed"],
        ),
    )
