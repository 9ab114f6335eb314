# SPDX-License-Identifier: MIT
"""The policy that sends a prompt to the worker that has most of it cached.

An engine that publishes KV events is known by them. Any other is known by this gateway's own record of the prompts
that it was given, which is a guess: it may have evicted them. A guess that is wrong costs a prefill that another worker
would have had to do as well. The record also serves where no event has come yet: prompts of one prefix that arrive
together are computed once. With one worker there is nothing to choose, and nothing is recorded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenspeed.gateway.route.policy import Asked, Overload, W
from tokenspeed.gateway.route.token_tree import TokenTree


class CacheAware:
    """A prompt of which some worker holds at least the share `threshold` goes to that worker, unless it is overloaded;
    any other to the least loaded, and of those to the one that holds least."""

    name = "cache_aware"

    def __init__(self, threshold: float, overload: Overload, max_tree_tokens: int) -> None:
        self._threshold = threshold
        self._overload = overload
        self._tree = TokenTree(max_tree_tokens)

    @property
    def num_remembered(self) -> int:
        """Tokens of the tree."""
        return self._tree.num_tokens

    def choose(self, workers: Sequence[W], asked: Asked) -> tuple[W, str]:
        """Branches: event_hit (by KV events), hit (by the record), spill (the holder is overloaded), miss, single."""
        if len(workers) == 1:
            return workers[0], "single"
        tokens = array("I", asked.tokens)  # once: the tree copies an array by the block
        worker, branch = self._holder(workers, tokens)
        self._tree.insert(tokens, worker.url)
        return worker, branch

    def forget(self, url: str) -> None:
        """The worker's cache is empty."""
        self._tree.forget(url)

    def _holder(self, workers: Sequence[W], tokens: array[int]) -> tuple[W, str]:
        told = {worker.url: worker.blocks.match(tokens) for worker in workers if worker.blocks.known}
        recorded = self._tree.match(tokens)
        for matched, branch in ((told, "event_hit"), (recorded, "hit")):
            best = min(workers, key=lambda worker: (-matched.get(worker.url, 0), worker.num_in_flight))
            held = matched.get(best.url, 0)
            if held and held / len(tokens) >= self._threshold:
                if not self._overload.holds(best, workers):
                    return best, branch
                return self._emptiest(workers), "spill"
        return self._emptiest(workers), "miss"

    def _emptiest(self, workers: Sequence[W]) -> W:
        return min(workers, key=lambda worker: (worker.num_in_flight, self._num_held(worker)))

    def _num_held(self, worker: W) -> int:
        return worker.blocks.num_tokens if worker.blocks.known else self._tree.num_held(worker.url)
