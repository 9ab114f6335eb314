# SPDX-License-Identifier: MIT
"""One line about one request: what it cost and where its time went.

`RequestClock` collects time stamps while a request lives; the engine's loop calls it on its thread with the time it
read once for the step. `RequestClock.stats` makes the frozen `RequestStats`, whose repr is what the finish line of
the log carries under --enable-log-request-stats; tools parse it, so its fields, their order and their rounding are
fixed. Nothing here reads a clock or a device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestStats:
    """Statistics of an ended request. Times in milliseconds, time stamps in seconds since the Unix epoch.

    queue_ms, prefill_ms, ttft_ms, decode_tps, commit_ts are None when the request ended before that point; acc_len
    and acc_rate are None without speculation. preempt_ms is how long others' prefill delayed its decode, in
    preempt_count interruptions.
    """

    status: str
    reason: str
    prompt_tokens: int
    cache_tokens: int
    output_tokens: int
    cache_hit_rate: float
    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    total_ms: float
    preempt_ms: float
    preempt_count: int
    decode_tps: float | None
    acc_len: float | None
    acc_rate: float | None
    recv_ts: float
    commit_ts: float | None
    finish_ts: float


class RequestClock:
    """Collects the time stamps of one request, all in seconds since the Unix epoch."""

    __slots__ = (
        "recv_ts",
        "commit_ts",
        "prefilled_ts",
        "first_token_ts",
        "preempt_s",
        "preempt_count",
        "_delayed_since",
        "accepted_tokens",
        "draft_tokens",
        "num_drafts",
    )

    def __init__(self, recv_ts: float) -> None:
        self.recv_ts = recv_ts
        self.commit_ts: float | None = None
        self.prefilled_ts: float | None = None
        self.first_token_ts: float | None = None
        self.preempt_s = 0.0
        self.preempt_count = 0
        self._delayed_since: float | None = None
        self.accepted_tokens = 0
        self.draft_tokens = 0
        self.num_drafts = 0

    def scheduled(self, now: float) -> None:
        """The request is in a step; only the first one counts."""
        if self.commit_ts is None:
            self.commit_ts = now

    def prefilled(self, now: float) -> None:
        """The step with the prompt's last chunk has been computed."""
        if self.prefilled_ts is None:
            self.prefilled_ts = now

    def emitted(self, now: float) -> None:
        """Tokens of the request came out; only the first time counts."""
        if self.first_token_ts is None:
            self.first_token_ts = now

    def decode_delayed(self, delayed: bool, now: float) -> None:
        """Whether the step that carries this request's decode also prefills others; edges are counted."""
        if delayed and self._delayed_since is None:
            self._delayed_since = now
            self.preempt_count += 1
        elif not delayed and self._delayed_since is not None:
            self.preempt_s += now - self._delayed_since
            self._delayed_since = None

    def drafted(self, num_tokens: int, num_accepted: int) -> None:
        """A draft of num_tokens was verified and num_accepted of them kept."""
        self.num_drafts += 1
        self.draft_tokens += num_tokens
        self.accepted_tokens += num_accepted

    def stats(self, reason: str, prompt_tokens: int, cache_tokens: int, output_tokens: int, now: float) -> RequestStats:
        """The statistics at the request's end; reason is "stop", "length" or "abort"."""
        self.decode_delayed(False, now)
        return RequestStats(
            status="aborted" if reason == "abort" else "finished",
            reason=reason,
            prompt_tokens=prompt_tokens,
            cache_tokens=cache_tokens,
            output_tokens=output_tokens,
            cache_hit_rate=round(cache_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
            queue_ms=_between_ms(self.recv_ts, self.commit_ts),
            prefill_ms=_between_ms(self.commit_ts, self.prefilled_ts),
            ttft_ms=_between_ms(self.recv_ts, self.first_token_ts),
            total_ms=round((now - self.recv_ts) * 1e3, 1),
            preempt_ms=round(self.preempt_s * 1e3, 1),
            preempt_count=self.preempt_count,
            decode_tps=self._decode_tps(output_tokens, now),
            # A verified draft yields its accepted tokens and one more, the target model's own.
            acc_len=round(self.accepted_tokens / self.num_drafts + 1, 2) if self.num_drafts else None,
            acc_rate=round(self.accepted_tokens / self.draft_tokens, 4) if self.draft_tokens else None,
            recv_ts=round(self.recv_ts, 3),
            commit_ts=None if self.commit_ts is None else round(self.commit_ts, 3),
            finish_ts=round(now, 3),
        )

    def _decode_tps(self, output_tokens: int, now: float) -> float | None:
        """Tokens a second after the first token; None when there is no such window."""
        if self.first_token_ts is None or output_tokens < 2 or now <= self.first_token_ts:
            return None
        return round((output_tokens - 1) / (now - self.first_token_ts), 1)


def finish_line(request_id: str, stats: RequestStats) -> str:
    """The log line of an ended request."""
    return f"Req: {request_id} Finish! {stats!r}"


def _between_ms(start_ts: float | None, end_ts: float | None) -> float | None:
    if start_ts is None or end_ts is None:
        return None
    return round((end_ts - start_ts) * 1e3, 1)
