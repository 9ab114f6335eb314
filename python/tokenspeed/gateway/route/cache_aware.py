# SPDX-License-Identifier: MIT
"""The policy that sends a prompt to the worker that has most of it cached.

An engine that publishes KV events is known by them. Any other is known by this gateway's own record of the prompts
that it was given (a tree, or hashes of heads), which is a guess: it may have evicted them. A guess that is wrong costs
a prefill that another worker would have had to do as well. The record also serves where no event has come yet: prompts
of one prefix that arrive together are computed once. With one worker there is nothing to choose, and nothing is
recorded.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tokenspeed.config.gateway_balance import CacheAwareConfig, LoadPrices, SpillConfig
from tokenspeed.gateway.route.head_index import HeadIndex
from tokenspeed.gateway.route.policy import Asked, Choice, Loaded, W, backlog
from tokenspeed.gateway.route.token_tree import TokenTree
from tokenspeed.gateway.route.warmup import Warmup


class Record(Protocol):
    """Prompts that workers were given."""

    @property
    def num_remembered(self) -> int: ...
    def match(self, tokens: array[int]) -> dict[str, int]: ...
    def insert(self, tokens: array[int], url: str) -> None: ...
    def num_held(self, url: str) -> int: ...
    def forget(self, url: str) -> None: ...


def must_spill(worker: Loaded, workers: Sequence[Loaded], num_held: int, config: SpillConfig) -> bool:
    """Whether the holder of `num_held` tokens of a prompt has too many requests for it. Small pools spill by less than
    the threshold: beyond two standard deviations of what the mean alone makes likely, or what the prefix is worth."""
    mean = sum(other.num_in_flight for other in workers) / len(workers)
    margin = max(4.0, 2 * math.sqrt(mean))
    if config.margin_tokens:
        margin = max(margin, math.ceil(num_held / config.margin_tokens))
    above = worker.num_in_flight - mean
    return above > min(config.abs_threshold, margin) and worker.num_in_flight > config.rel_threshold * mean


class CacheAware:
    """A prompt of which some worker holds enough goes to that worker, unless it has too much to do; any other to the
    least loaded, and of those to the one that holds least. `clock` gives seconds that never go back."""

    name = "cache_aware"

    def __init__(
        self,
        config: CacheAwareConfig,
        prices: LoadPrices,
        clock: Callable[[], float],
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._mean_tokens = prices.mean_prefill_tokens
        self._uniform = uniform
        self._record: Record = (
            HeadIndex(config.boundaries, config.ttl_s, clock)
            if config.index == "hash"
            else TokenTree(config.max_tree_tokens)
        )
        self._warmup = Warmup(config.warmup, clock)
        self.num_margin_held = 0
        """Holders that the price of a prefix kept from spilling."""

    @property
    def num_remembered(self) -> int:
        """Tokens of the tree, or heads."""
        return self._record.num_remembered

    def choose(self, workers: Sequence[W], asked: Asked) -> Choice[W]:
        """Branches: event_match (by KV events), tree_match (by the record), spill (the holder has too much to do),
        kv_ceiling (its KV pool is too full), kv_spread (the pools differ too much), divert and warm_up (to fill an
        empty cache), expected_wait_fallback (nobody holds enough), single."""
        if len(workers) == 1:
            return Choice(workers[0], "single")
        tokens = array("I", asked.tokens)  # once: the tree copies an array by the block
        choice = self._chosen(workers, tokens)
        self._record.insert(tokens, choice.worker.url)
        return choice

    @property
    def remembers(self) -> str:
        """Tokens or heads."""
        return "cache_placement_entries" if self._config.index == "hash" else "cache_tree_tokens"

    def num_keys(self, url: str) -> int:
        """It keeps no keys."""
        return 0

    def forget(self, url: str) -> None:
        """The worker's cache is empty."""
        self._record.forget(url)

    def _chosen(self, workers: Sequence[W], tokens: array[int]) -> Choice[W]:
        told = {worker.url: worker.blocks.match(tokens) for worker in workers if worker.blocks.known}
        found = self._record.match(tokens)
        usages = [worker.kv_usage for worker in workers]
        share = max((*told.values(), *found.values()), default=0) / max(1, len(tokens))
        if self._config.spill.usage_spread < 1 and max(usages) - min(usages) > self._config.spill.usage_spread:
            return Choice(self._emptiest(workers), "kv_spread", 0, share)
        for held, branch, temperature in (
            (told, "event_match", self._config.temperature),
            (found, "tree_match", 0.0),
        ):
            best = self._best(workers, held, len(tokens), temperature)
            num_held = held.get(best.url, 0)
            if num_held and num_held / len(tokens) >= self._config.threshold:
                return self._held(workers, best, num_held, branch)._replace(overlap=num_held / len(tokens))
        cold = self._warmup.for_miss(workers)
        if cold is not None:
            return Choice(cold, "warm_up", 0, share)
        return Choice(self._emptiest(workers), "expected_wait_fallback", 0, share)

    def _held(self, workers: Sequence[W], best: W, num_held: int, branch: str) -> Choice[W]:
        """The holder, or the one to take in its place."""
        spill = self._config.spill
        if spill.usage_ceiling < 1 and best.kv_usage > spill.usage_ceiling:
            calm = [worker for worker in workers if worker.kv_usage <= spill.usage_ceiling]
            if calm:
                return Choice(self._emptiest(calm), "kv_ceiling")
        if must_spill(best, workers, num_held, spill):
            return Choice(self._emptiest(workers), "spill")
        if spill.margin_tokens and must_spill(best, workers, 0, spill):
            self.num_margin_held += 1
        cold = self._warmup.for_hit(workers, num_held) if branch == "event_match" else None
        if cold is not None and cold is not best:
            return Choice(cold, "divert")
        return Choice(best, branch, num_held if self._config.uncached_credit else 0)

    def _best(self, workers: Sequence[W], held: Mapping[str, int], num_tokens: int, temperature: float) -> W:
        """The worker whose share of the prompt, less what its backlog takes from it, is the largest."""
        scores = {worker.url: float(held.get(worker.url, 0)) for worker in workers}
        if self._config.overlap_decay and num_tokens:
            backlogs = {worker.url: backlog(worker, self._mean_tokens) * self._mean_tokens for worker in workers}
            least = min(backlogs.values())
            for url, tokens in backlogs.items():
                scores[url] /= 1 + self._config.overlap_decay * (tokens - least) / num_tokens
        if temperature and any(scores.values()):
            return self._drawn(workers, scores, temperature)
        return min(workers, key=lambda worker: (-scores[worker.url], worker.num_in_flight))

    def _drawn(self, workers: Sequence[W], scores: Mapping[str, float], temperature: float) -> W:
        """One by softmax over the scores between the worst and the best."""
        low, high = min(scores.values()), max(scores.values())
        span = high - low or 1.0
        weights = [math.exp(((scores[worker.url] - low) / span - 1) / temperature) for worker in workers]
        left = self._uniform() * sum(weights)
        for worker, weight in zip(workers, weights, strict=True):
            left -= weight
            if left < 0:
                return worker
        return workers[-1]

    def _emptiest(self, workers: Sequence[W]) -> W:
        """By requests in flight and prompts that are not computed yet, then by what it holds."""
        return min(
            workers,
            key=lambda worker: (worker.num_in_flight + backlog(worker, self._mean_tokens), self._num_held(worker)),
        )

    def _num_held(self, worker: W) -> int:
        return worker.blocks.num_tokens if worker.blocks.known else self._record.num_held(worker.url)
