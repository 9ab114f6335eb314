# SPDX-License-Identifier: MIT
"""The gateway's settings of two policies that weigh caches and loads, cache_aware and least_load: flags and what they
come to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import Flag, FlagError
from tokenspeed.config.flags_rows import Rows


@dataclass(frozen=True)
class LoadPrices:
    """What a worker's load is worth in seconds of waiting: see `gateway.route.policy.wait_s`."""

    kv_pressure_s: float
    """k of the KV pool in use costs this times k / (1 - k)."""
    tokens_per_s: float
    """What an engine gets through when none of them has shown a rate."""
    mean_prefill_tokens: int
    """What a queued request is worth of which only the number is known."""
    max_waiting: int
    """least_load passes a worker whose engine queues so many requests; 0: it never does."""


@dataclass(frozen=True)
class SpillConfig:
    """When cache_aware passes the holder of a prefix. "abs" counts requests above the mean of all workers, "rel" is a
    multiple of that mean."""

    abs_threshold: float
    rel_threshold: float
    margin_tokens: int
    """Tokens of a held prefix that are worth one request of the margin; 0: prefixes have no price."""
    usage_spread: float
    """Difference between the fullest and the emptiest KV pool at which caches count no more; 1: never."""
    usage_ceiling: float
    """Share of its KV pool in use at which a holder is passed; 1: never."""


@dataclass(frozen=True)
class WarmupConfig:
    """How cache_aware fills the caches of workers that hold little, by what KV events say of them."""

    age_s: float
    """So long after it became ready a worker is new; 0: no worker ever is."""
    share: float
    """Of the prompts that nobody holds, for new and thin workers."""
    blocks: int
    """Growth by so many blocks makes a worker warm."""
    thin_ratio: float
    """Less than this share of the median of all workers is thin; 0: none is."""
    divert_every: int
    """One in so many prompts that somebody holds goes to a thin worker; 0: none does."""


@dataclass(frozen=True)
class CacheAwareConfig:
    """The policy cache_aware."""

    threshold: float
    """Share of a prompt that a worker must hold."""
    max_tree_tokens: int
    index: str
    """How prompts are remembered: "tree" (every token) or "hash" (heads of `boundaries` tokens, for `ttl_s`)."""
    boundaries: tuple[int, ...]
    ttl_s: float
    spill: SpillConfig
    warmup: WarmupConfig
    uncached_credit: bool
    """A prompt is booked without what its worker holds of it."""
    overlap_decay: float
    """A backlog of x prompts like this one divides what a worker holds by 1 + decay * x."""
    temperature: float
    """Of the choice among workers that told what they hold; 0: the best one."""


_flag = Rows("Routing")

BALANCE_FLAGS: tuple[Flag, ...] = (
    _flag("--cache-threshold --cache-match-threshold", "float", 0.3, "cache_aware: share that must match"),
    _flag(
        "--balance-abs-threshold --spill-abs-threshold",
        "float",
        64.0,
        "cache_aware: requests above the mean at which the holder is passed by, at most; small pools spill sooner",
    ),
    _flag("--balance-rel-threshold --spill-rel-threshold", "float", 1.5, "cache_aware: and multiple of the mean"),
    _flag(
        "--balance-prefix-margin-tokens",
        "int",
        0,
        "cache_aware: so many held tokens are worth waiting behind one request more; 0: prefixes have no price",
    ),
    _flag("--balance-uncached-credit", "switch", False, "cache_aware: held tokens do not count as work that waits"),
    _flag(
        "--balance-token-usage-threshold",
        "float",
        1.0,
        "cache_aware: spread of KV usage over the workers at which caches count no more; 1: never",
    ),
    _flag(
        "--overload-token-usage-threshold", "float", 1.0, "cache_aware: KV usage of a holder to pass it by; 1: never"
    ),
    _flag("--max-tree-size", "int", 67108864, "cache_aware: prompt tokens remembered, of all workers"),
    _flag(
        "--eviction-interval-secs --eviction-interval",
        "float",
        60.0,
        "accepted: the tree is kept within its bound at every prompt",
    ),
    _flag("--cache-index", "str", "tree", "cache_aware: how prompts are remembered", ("tree", "hash")),
    _flag("--cache-boundaries", "append", (), "cache_aware, hash: lengths of the heads, in tokens, by commas"),
    _flag("--cache-ttl-secs", "float", 180.0, "cache_aware, hash: how long a head is remembered"),
    _flag(
        "--selection-policy",
        "str",
        "cache-aware-default",
        "cache_aware: the one way to select",
        ("cache-aware-default",),
    ),
    _flag("--overlap-decay", "float", 0.0, "cache_aware: how much a backlog takes from what a worker holds"),
    _flag("--selection-temperature", "float", 0.0, "cache_aware: randomness among workers with KV events; 0: none"),
    _flag("--worker-warmup-secs", "float", 60.0, "cache_aware, KV events: how long a worker is new; 0: none is"),
    _flag("--worker-warmup-share", "float", 0.25, "cache_aware, KV events: share of misses for new and thin workers"),
    _flag("--worker-warmup-blocks", "int", 1024, "cache_aware, KV events: growth that makes a worker warm"),
    _flag(
        "--worker-warmup-thin-ratio", "float", 0.5, "cache_aware, KV events: less than this share of the median is thin"
    ),
    _flag("--worker-warmup-divert-every", "int", 8, "cache_aware, KV events: one hit in so many goes to a thin worker"),
    _flag("--least-load-kv-pressure-weight", "float", 0.15, "least_load: seconds that KV usage is worth"),
    _flag("--least-load-default-throughput", "float", 2000.0, "least_load: tokens a second where no engine shows any"),
    _flag("--least-load-mean-prefill-tokens", "int", 1024, "tokens of a queued request whose prompt is not known"),
    _flag("--least-load-max-waiting-requests", "int", 0, "least_load: queue at which a worker is passed by; 0: never"),
)

BALANCE_LISTS = frozenset({"--cache-boundaries"})

BALANCE_RANGES: tuple[tuple[str, float, float], ...] = (
    ("--cache-threshold", 0, 1),
    ("--balance-abs-threshold", 0, 1e9),
    ("--balance-rel-threshold", 1, 1e9),
    ("--balance-prefix-margin-tokens", 0, 2**31),
    ("--balance-token-usage-threshold", 0.001, 1e9),
    ("--overload-token-usage-threshold", 0.001, 1e9),
    ("--max-tree-size", 1, 2**40),
    ("--eviction-interval-secs", 0, 1e9),
    ("--cache-ttl-secs", 0.001, 1e9),
    ("--overlap-decay", 0, 1e9),
    ("--selection-temperature", 0, 1e9),
    ("--worker-warmup-secs", 0, 1e9),
    ("--worker-warmup-share", 0, 1),
    ("--worker-warmup-blocks", 1, 2**31),
    ("--worker-warmup-thin-ratio", 0, 1),
    ("--worker-warmup-divert-every", 0, 2**31),
    ("--least-load-kv-pressure-weight", 0, 1e9),
    ("--least-load-default-throughput", 0.001, 1e12),
    ("--least-load-mean-prefill-tokens", 1, 2**31),
    ("--least-load-max-waiting-requests", 0, 2**31),
)


def load_prices(values: dict[str, Any]) -> LoadPrices:
    """The slice of the parsed flags."""
    return LoadPrices(
        kv_pressure_s=values["least_load_kv_pressure_weight"],
        tokens_per_s=values["least_load_default_throughput"],
        mean_prefill_tokens=values["least_load_mean_prefill_tokens"],
        max_waiting=values["least_load_max_waiting_requests"],
    )


def cache_aware_config(values: dict[str, Any]) -> CacheAwareConfig:
    """The slice of the parsed flags. Raises `FlagError`."""
    boundaries = _boundaries(values["cache_boundaries"])
    if values["cache_index"] == "hash" and not boundaries:
        raise FlagError("--cache-index", "hash remembers the heads of --cache-boundaries, which must be given")
    if values["cache_index"] == "tree" and boundaries:
        raise FlagError("--cache-boundaries", "the tree remembers every token; heads are those of --cache-index hash")
    return CacheAwareConfig(
        threshold=values["cache_threshold"],
        max_tree_tokens=values["max_tree_size"],
        index=values["cache_index"],
        boundaries=boundaries,
        ttl_s=values["cache_ttl_secs"],
        spill=SpillConfig(
            abs_threshold=values["balance_abs_threshold"],
            rel_threshold=values["balance_rel_threshold"],
            margin_tokens=values["balance_prefix_margin_tokens"],
            usage_spread=values["balance_token_usage_threshold"],
            usage_ceiling=values["overload_token_usage_threshold"],
        ),
        warmup=WarmupConfig(
            age_s=values["worker_warmup_secs"],
            share=values["worker_warmup_share"],
            blocks=values["worker_warmup_blocks"],
            thin_ratio=values["worker_warmup_thin_ratio"],
            divert_every=values["worker_warmup_divert_every"],
        ),
        uncached_credit=values["balance_uncached_credit"],
        overlap_decay=values["overlap_decay"],
        temperature=values["selection_temperature"],
    )


def _boundaries(words: Sequence[str]) -> tuple[int, ...]:
    numbers = [word.strip() for text in words for word in text.split(",") if word.strip()]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise FlagError("--cache-boundaries", f"{','.join(words)!r} are not numbers of tokens")
    return tuple(sorted({int(number) for number in numbers}))
