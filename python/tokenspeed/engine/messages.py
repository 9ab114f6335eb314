# SPDX-License-Identifier: MIT
"""What travels between the loop and a frontend: commands in, a batch of columns out. Plain data, no behaviour.

A frontend is the lane to a gateway or the in-process queue of `Engine` and `AsyncLLM`; the loop knows only this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.config.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Add:
    """One request of one choice (`params.n` is 1 by now). token_ids: int32 [prompt tokens]."""

    rid: str
    token_ids: NDArray[np.int32]
    params: SamplingParams
    priority: int
    cache_salt: int
    traceparent: str | None = None
    """The caller's span."""
    data_rank: int | None = None
    """The replica that must serve it; None: any."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that its frontend could not even read into an `Add`; it is answered like any rejection."""

    rejection: Rejection


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for these requests any more. Unknown ids are normal: they ended meanwhile."""

    rids: list[str]


@dataclass(frozen=True, slots=True)
class End:
    """The texts of these requests are complete, at a stop string that their frontend found: they end by a stop."""

    rids: list[str]


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Nobody waits for anything any more; `reason` is for the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class Connected:
    """Somebody new listens: tell the load now, not at the next result."""


@dataclass(frozen=True, slots=True)
class Control:
    """A call to the engine itself. `reply(success, message)` is called exactly once."""

    method: str
    args: list[Any]
    reply: Callable[[bool, str], None]


Command = Add | Refused | Abort | End | AbortAll | Connected | Control


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request ended by nobody's wish: by its caller's fault, mostly before it had a token, or because the model
    has none for it. `status` as HTTP has it; `field`: the parameter at fault, "" for none."""

    rid: str
    status: int
    field: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of a request's new tokens: of each, and of the `logprobs` most probable alternatives (best first).
    Behind them stand those of its `token_ids_logprob`."""

    values: list[float]
    top_values: list[list[float]]
    top_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from position `start` on, each given those before it; None at position 0. The
    rest is as `TokenLogprobs` has it."""

    start: int
    token_ids: list[int]
    values: list[float | None]
    top_values: list[list[float]]
    top_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """Requests and KV blocks at one moment. `active_blocks` are held by running requests; the cache's are not."""

    num_running: int
    num_waiting: int
    active_blocks: int
    total_blocks: int

    @staticmethod
    def sum_of(loads: Iterable[LoadNumbers]) -> LoadNumbers:
        """Of several replicas together."""
        rows = [(load.num_running, load.num_waiting, load.active_blocks, load.total_blocks) for load in loads]
        return LoadNumbers(*(sum(column) for column in zip(*rows)))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one settled step gave: a column per property, an element per request, all of equal length.

    token_ids: new tokens only. finish: "", "stop", "length" or "abort". completion_tokens: so far. matched_tokens:
    the stop or end-of-text token that ended the request, else -1. logprobs, prompt_logprobs: None when nobody asked;
    the latter come once, with a request's first tokens. weight_version: the name of the weights that served.
    """

    rids: list[str]
    token_ids: list[list[int]]
    finish: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    matched_tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None
    prompt_logprobs: list[PromptLogprobs | None] | None
    rejections: list[Rejection]
    load: LoadNumbers
    weight_version: str


class Frontend(Protocol):
    """Where commands come from and results go. Called by the loop's thread only."""

    def drain(self, timeout_s: float) -> list[Command]:
        """Everything that has arrived, in order; waits up to `timeout_s` for the first (0: not at all)."""

    def publish(self, output: StepOutput) -> None:
        """Hand results on; never blocks."""
