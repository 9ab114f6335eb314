# SPDX-License-Identifier: MIT
"""Which worker was given which head of a prompt, by hashes of heads of a few lengths, each for a limited time.

For engines that keep reusable states at some positions only, and for gateways that should remember little: an entry
is some dozens of bytes, whatever the prompt's length. A pure machine over a clock; owned by `CacheAware`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

_MAX_ENTRIES = 1_000_000
"""Clients choose the prompts; beyond this many the oldest entry is forgotten."""

_Entry = tuple[bytes, str]
"""(hash of a head, worker)."""


class HeadIndex:
    """`boundaries`: lengths of heads in tokens, ascending. `clock` gives seconds that never go back."""

    def __init__(self, boundaries: Sequence[int], ttl_s: float, clock: Callable[[], float]) -> None:
        self._boundaries = boundaries
        self._ttl_s = ttl_s
        self._clock = clock
        self._given_s: OrderedDict[_Entry, float] = OrderedDict()
        """When, from the oldest to the newest."""
        self._urls: dict[bytes, set[str]] = {}
        self._held: Counter[str] = Counter()

    @property
    def num_remembered(self) -> int:
        """Entries that are held."""
        return len(self._given_s)

    def num_held(self, url: str) -> int:
        """Heads that a worker was given."""
        return self._held[url]

    def match(self, tokens: array[int]) -> dict[str, int]:
        """For each worker that was given a head of `tokens`, the longest one's length."""
        self._expire()
        found: dict[str, int] = {}
        for length, key in self._heads(tokens):
            found.update(dict.fromkeys(self._urls.get(key, ()), length))
        return found

    def insert(self, tokens: array[int], url: str) -> None:
        """The worker was given `tokens`."""
        now_s = self._clock()
        for _, key in self._heads(tokens):
            if (key, url) not in self._given_s:
                self._urls.setdefault(key, set()).add(url)
                self._held[url] += 1
            self._given_s[key, url] = now_s
            self._given_s.move_to_end((key, url))
        self._expire()

    def forget(self, url: str) -> None:
        """The worker holds nothing any more."""
        for entry in [entry for entry in self._given_s if entry[1] == url]:
            self._drop(entry)

    def _heads(self, tokens: array[int]) -> Iterator[tuple[int, bytes]]:
        """(length, hash) of every head that `tokens` has, ascending."""
        hashed, at = hashlib.blake2b(digest_size=16), 0
        for length in self._boundaries:
            if length > len(tokens):
                return
            hashed.update(tokens[at:length].tobytes())
            at = length
            yield length, hashed.digest()

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._given_s:
            entry, given_s = next(iter(self._given_s.items()))
            if given_s > oldest_s and len(self._given_s) <= _MAX_ENTRIES:
                return
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        key, url = entry
        del self._given_s[entry]
        self._held[url] -= 1
        self._urls[key].discard(url)
        if not self._urls[key]:
            del self._urls[key]
