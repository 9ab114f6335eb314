# SPDX-License-Identifier: MIT
"""The engine's batch lines, in the form that operators grep and scripts parse.

Pure formatting and one small meter: the engine's loop makes the record after a step and logs its `line()`.
A line is due for every step that computes prompt tokens, and for one in DECODE_LOG_INTERVAL that only decode.
"""

from __future__ import annotations

from dataclasses import dataclass

DECODE_LOG_INTERVAL = 40


@dataclass(frozen=True)
class PrefillBatch:
    """A step with prompt tokens. num_decode > 0 makes it a mixed batch.

    num_new_seqs: requests with prompt tokens in it, any chunk. num_cached_tokens: prefix hits of those that begin.
    """

    dp_rank: int
    num_new_seqs: int
    num_new_tokens: int
    num_cached_tokens: int
    num_decode: int
    num_running: int
    num_queued: int

    def line(self) -> str:
        """`Prefill batch. ...` or `Mix batch. ...`."""
        kind = "Mix" if self.num_decode else "Prefill"
        return (
            f"{kind} batch. #dp-rank: {self.dp_rank}, #new-seq: {self.num_new_seqs}, "
            f"#new-token: {self.num_new_tokens}, #cached-token: {self.num_cached_tokens}, "
            f"#running-req: {self.num_running}, #queue-req: {self.num_queued}"
        )


@dataclass(frozen=True)
class Blocks:
    """KV blocks: held by running requests, cached and reusable, and in the whole pool."""

    active: int
    cached: int
    total: int


@dataclass(frozen=True)
class DecodeBatch:
    """Steps that only decode. tokens_per_s is the throughput since the last line.

    accept_len and accept_rate are None without speculation; the rate is 0 to 1.
    """

    dp_rank: int
    num_running: int
    mean_seq_len: float
    blocks: Blocks
    tokens_per_s: float
    accept_len: float | None
    accept_rate: float | None
    num_queued: int

    def line(self) -> str:
        """`Decode batch. ...`."""
        blocks = self.blocks
        ratio = blocks.active / blocks.total if blocks.total else 0.0
        accepted = ""
        if self.accept_len is not None and self.accept_rate is not None:
            accepted = f", avg_accept_len: {self.accept_len:.2f}, accept_rate: {self.accept_rate:.2f}"
        return (
            f"Decode batch. #dp-rank: {self.dp_rank}, #running-req: {self.num_running}, "
            f"avg_seq_len: {self.mean_seq_len:.1f}, "
            f"#pages(active/cached/total): {blocks.active}/{blocks.cached}/{blocks.total}, page ratio: {ratio:.2f}, "
            f"gen throughput (token/s): {self.tokens_per_s:.2f}{accepted}, #queue-req: {self.num_queued}"
        )


class DecodeMeter:
    """Says when a decode line is due and how fast tokens came since the last one."""

    def __init__(self, interval_steps: int = DECODE_LOG_INTERVAL) -> None:
        if interval_steps < 1:
            raise ValueError(f"decode_log_interval must be at least 1, not {interval_steps}")
        self._interval = interval_steps
        self._steps = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._since: float | None = None
        """Up to when time has been counted; None while nothing runs."""

    def launched(self, now: float) -> None:
        """A decode step begins at `now` (seconds of any steady clock): time counts from the first after a pause on."""
        if self._since is None:
            self._since = now

    def settled(self, num_tokens: int, now: float) -> float | None:
        """A decode step gave num_tokens at `now`.

        Returns tokens per second when a line is due (0.0 when no time has passed), else None.
        """
        if self._since is not None:
            self._busy_s += now - self._since
        self._since = now
        self._tokens += num_tokens
        self._steps += 1
        if self._steps < self._interval:
            return None
        rate = self._tokens / self._busy_s if self._busy_s > 0 else 0.0
        self._steps, self._tokens, self._busy_s = 0, 0, 0.0
        return rate

    def idle(self) -> None:
        """Nothing runs any more: the pause must not count as decode time. Steps count on."""
        self._since = None
