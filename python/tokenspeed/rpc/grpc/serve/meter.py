# SPDX-License-Identifier: MIT
"""How fast tokens come and how much of the prompts the cache had, from what the service sends. One thread."""

from __future__ import annotations

import time

_WINDOW_S = 1.0


class LoadMeter:
    def __init__(self) -> None:
        self._num_tokens = 0
        self._since_s = time.monotonic()
        self._rate = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def sent(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def ended(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def tokens_per_s(self) -> float:
        """Over the last second or more that was asked about."""
        now_s = time.monotonic()
        if now_s - self._since_s >= _WINDOW_S:
            self._rate = self._num_tokens / (now_s - self._since_s)
            self._num_tokens, self._since_s = 0, now_s
        return self._rate

    @property
    def cache_hit_rate(self) -> float:
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
