# SPDX-License-Identifier: MIT
"""From the routing flags to a policy. Called once, at start."""

from __future__ import annotations

import time

from tokenspeed.config.gateway_routing import RoutingConfig
from tokenspeed.gateway.route.bucket import Bucket
from tokenspeed.gateway.route.cache_aware import CacheAware
from tokenspeed.gateway.route.hashing import ConsistentHashing, PrefixHash
from tokenspeed.gateway.route.policy import BY_LOAD, ByLoad, Overload, Policy, backlog, least_wait, power_of_two
from tokenspeed.gateway.route.sticky import Keys, Manual, StickyKeys


def make_policy(config: RoutingConfig, keys: Keys | None = None) -> Policy:
    """The policy that `config` asks for. keys: who knows the workers of routing keys; None: a table of its own."""
    if config.policy == "manual":
        return keys or make_table(config)
    policy = _named(config)
    return StickyKeys(policy, keys or make_table(config)) if config.sticky else policy


def make_table(config: RoutingConfig) -> Manual:
    """The table of routing keys."""
    return Manual(config.sticky_idle_s, config.assignment_mode, time.monotonic)


def _named(config: RoutingConfig) -> Policy:
    """The policy that `config.policy` names, one of `POLICY_NAMES`."""
    if config.policy == "cache_aware":
        return CacheAware(config.cache, config.prices, time.monotonic)
    if config.policy == "prefix_hash":
        overload = Overload(config.prefix_hash_abs_threshold, config.prefix_hash_load_factor)
        return PrefixHash(config.prefix_tokens, overload)
    if config.policy == "consistent_hashing":
        return ConsistentHashing()
    if config.policy == "bucket":
        overload = Overload(config.cache.spill.abs_threshold, config.cache.spill.rel_threshold)
        return Bucket(config.bucket_interval_s, overload, time.monotonic)
    if config.policy == "power_of_two" and config.load_metric == "expected_wait":
        mean = config.prices.mean_prefill_tokens
        return ByLoad(config.policy, power_of_two(lambda worker: (backlog(worker, mean), worker.num_in_flight)))
    if config.policy == "least_load":
        return ByLoad(config.policy, least_wait(config.prices))
    return ByLoad(config.policy, BY_LOAD[config.policy]())
