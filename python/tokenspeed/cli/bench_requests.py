# SPDX-License-Identifier: MIT
"""Requests of `ts bench serve`: what one streamed answer's lines tell and when they came, and a run of many sessions.

`Recorder` is pure: lines and times in, an `Outcome` out. `run_sessions` runs on one event loop, keeps the arrival times
whatever the server does, and holds at most `limit` requests open. A request that fails is an outcome with its reason.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.cli.bench_workloads import Session
from tokenspeed.cli.eval_server import Client, ServerError

Messages = list[dict[str, str]]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Outcome:
    """Seconds of one request; `error` is empty when it was answered. token_times: of each chunk with output, since the
    request was sent. counted: the server told its tokens; else chunks stand for them."""

    begin_s: float
    end_s: float
    token_times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    counted: bool
    text: str
    error: str

    @property
    def e2e_s(self) -> float:
        """Until the last output."""
        return self.token_times[-1]

    @property
    def ttft_s(self) -> float:
        return self.token_times[0]

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None with one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Recorder:
    """Reads one server-sent stream."""

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._times: list[float] = []
        self._text: list[str] = []
        self._usage: dict[str, Any] = {}
        self._ended = False

    def feed(self, line: bytes, now_s: float) -> None:
        """Raises ServerError for an error that the stream holds."""
        name, _, data = line.strip().partition(b":")
        if name != b"data":
            return
        if data.strip() == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise ServerError(f"in the stream: {data.decode(errors='replace')[:300]}")
        self._usage = chunk.get("usage") or self._usage
        pieces = [_piece(choice) for choice in chunk.get("choices") or []]
        self._ended = self._ended or any(choice.get("finish_reason") for choice in chunk.get("choices") or [])
        if any(piece is not None for piece in pieces):
            self._times.append(now_s - self._begin_s)
            self._text.extend(piece or "" for piece in pieces)

    def outcome(self, end_s: float, error: str) -> Outcome:
        if not error and not self._ended:
            error = "the stream ended early"
        if not error and not self._times:
            error = "the answer has no output"
        counted = bool(self._usage.get("completion_tokens"))
        return Outcome(
            self._begin_s,
            end_s,
            tuple(self._times),
            int(self._usage.get("prompt_tokens") or 0),
            int(self._usage["completion_tokens"]) if counted else len(self._times),
            counted,
            "".join(self._text),
            error,
        )


def _piece(choice: dict[str, Any]) -> str | None:
    """The text of a chunk, "" when its output is no text of the answer, None without output."""
    delta = choice.get("delta") or {}
    content = choice.get("text") or delta.get("content")
    if content:
        return str(content)
    hidden = ("reasoning_content", "reasoning", "tool_calls")
    return "" if any(delta.get(name) for name in hidden) else None


Send = Callable[[Messages, int], Awaitable[Outcome]]


class Sender:
    """Streams one request a call. fields: what every body holds besides."""

    def __init__(self, client: Client, api: str, fields: dict[str, Any], clock: Callable[[], float]) -> None:
        self._client, self._api, self._fields, self._clock = client, api, fields, clock

    async def __call__(self, messages: Messages, max_tokens: int) -> Outcome:
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            **self._fields,
        }
        if self._api == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = "\n\n".join(message["content"] for message in messages)
        recorder, error = Recorder(self._clock()), ""
        try:
            async for line in self._client.lines(_PATHS[self._api], body):
                recorder.feed(line, self._clock())
        except ServerError as failure:
            error = str(failure)
        return recorder.outcome(self._clock(), error)


async def run_sessions(
    sessions: Sequence[Session],
    starts_s: Sequence[float],
    send: Send,
    limit: int | None,
    done: Callable[[Outcome], None],
) -> list[Outcome]:
    """An outcome a turn, in the sessions' order. done: told of each as it ends."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    slots = asyncio.Semaphore(limit or 1 << 30)

    async def one(session: Session, start_s: float) -> list[Outcome]:
        await asyncio.sleep(begin_s + start_s - loop.time())
        messages: Messages = [{"role": "system", "content": session.system}] if session.system else []
        outcomes: list[Outcome] = []
        for turn in session.turns:
            if outcomes and outcomes[-1].error:
                at_s = outcomes[-1].end_s
                outcome = Recorder(at_s).outcome(at_s, "not sent: the turn before it failed")
            else:
                messages.append({"role": "user", "content": turn.content})
                async with slots:
                    outcome = await send(list(messages), turn.max_tokens)
                messages.append({"role": "assistant", "content": outcome.text})
            outcomes.append(outcome)
            done(outcome)
        return outcomes

    runs = (one(session, start_s) for session, start_s in zip(sessions, starts_s, strict=True))
    return [outcome for outcomes in await asyncio.gather(*runs) for outcome in outcomes]
