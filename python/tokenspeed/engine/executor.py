# SPDX-License-Identifier: MIT
"""Where a launched step runs: on this thread, on its own thread (CPU overlap), or on a GPU's stream.

`launch` returns a `Pending` at once (the inline executor: when the step is done) and keeps the order of launches.
The kernels release the interpreter's lock, so on a CPU the loop's thread plans and publishes meanwhile.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.engine.pending import Done, OnThread, Pending
from tokenspeed.engine.prompt_scores import PromptPiece
from tokenspeed.engine.runner import ModelRunner, Sampled, SampleOutput, Scores, StepWork
from tokenspeed.sampling import NUMERICAL_ERROR, RowFailure


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step's result on the host, a row per row of the plan.

    token_ids: int32 [R, 1], -1 where a row sampled nothing. num_tokens: int32 [R]. Logprobs, when asked for:
    token_logprobs float32 [R], top_values float32 [R, n], top_ids int32 [R, n], chosen float32 [R, m]. failures: (row,
    why) of rows whose requests cannot go on.
    """

    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    token_logprobs: NDArray[np.float32] | None
    top_values: NDArray[np.float32] | None
    top_ids: NDArray[np.int32] | None
    chosen: NDArray[np.float32] | None
    prompt_pieces: list[PromptPiece]
    failures: list[tuple[int, RowFailure]]


class Executor(Protocol):
    def launch(self, work: StepWork) -> Pending[StepTokens]: ...

    def close(self) -> None:
        """End the executor's threads; nothing may be in flight."""


class InlineExecutor:
    """Overlap 0 on a CPU."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, work: StepWork) -> Pending[StepTokens]:
        return Done(to_host(self._runner.run(work)))

    def close(self) -> None:
        return


class ThreadExecutor:
    """Overlap on a CPU: one thread runs steps in the order of launches."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")

    def launch(self, work: StepWork) -> Pending[StepTokens]:
        return OnThread(self._thread.submit(lambda: to_host(self._runner.run(work))))

    def close(self) -> None:
        self._thread.shutdown()


class StreamExecutor:
    """A GPU: launching only queues work on the stream; results arrive in pinned memory behind an event.

    num_buffers: steps that may be unsettled at once, plus one; max_rows: of a step.
    """

    def __init__(self, runner: ModelRunner, num_buffers: int, max_rows: int) -> None:
        self._runner = runner
        self._tokens = [torch.empty(max_rows, dtype=torch.int32, pin_memory=True) for _ in range(num_buffers)]
        self._turn = 0

    def launch(self, work: StepWork) -> Pending[StepTokens]:
        sampled = self._runner.run(work)
        self._turn = (self._turn + 1) % len(self._tokens)
        host = None if sampled.output is None else HostOutput.copy_of(sampled.output, self._tokens[self._turn])
        scores: list[Scores] = [
            (request_id, _pinned(values), _pinned(top_values), _pinned(top_ids))
            for request_id, values, top_values, top_ids in sampled.scores
        ]
        return OnStream(Sampled(sampled.num_rows, sampled.sample_rows, host, scores))

    def close(self) -> None:
        torch.cuda.synchronize()


class OnStream:
    """A step whose result is being copied to pinned memory."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled
        self._event = torch.cuda.Event()
        self._event.record()

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> StepTokens:
        self._event.synchronize()
        return to_host(self._sampled)


@dataclass(frozen=True, slots=True)
class HostOutput:
    """A `SampleOutput` in pinned memory."""

    tokens: torch.Tensor
    token_logprobs: torch.Tensor | None
    top_values: torch.Tensor | None
    top_ids: torch.Tensor | None
    chosen: torch.Tensor | None
    nan_rows: torch.Tensor | None
    failures: list[tuple[int, RowFailure]]

    @classmethod
    def copy_of(cls, output: SampleOutput, tokens: torch.Tensor) -> HostOutput:
        """Every step has tokens, so their memory is there already; a captured one has even written them there."""
        on_host = not output.tokens.is_cuda
        return cls(
            output.tokens if on_host else tokens[: len(output.tokens)].copy_(output.tokens, non_blocking=True),
            None if output.token_logprobs is None else _pinned(output.token_logprobs),
            None if output.top_values is None else _pinned(output.top_values),
            None if output.top_ids is None else _pinned(output.top_ids),
            None if output.chosen is None else _pinned(output.chosen),
            None if output.nan_rows is None else _pinned(output.nan_rows),
            output.failures,
        )


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_host(sampled: Sampled) -> StepTokens:
    """Spread a result that is in host memory over the plan's rows."""
    token_ids = np.full((sampled.num_rows, 1), -1, np.int32)
    num_tokens = np.zeros(sampled.num_rows, np.int32)
    rows, output = sampled.sample_rows, sampled.output
    pieces = [
        PromptPiece(request_id, values.numpy(), top_values.numpy(), top_ids.numpy())
        for request_id, values, top_values, top_ids in sampled.scores
    ]
    if output is None:
        return StepTokens(token_ids, num_tokens, None, None, None, None, pieces, [])
    token_ids[rows, 0] = output.tokens.numpy()
    num_tokens[rows] = 1
    return StepTokens(
        token_ids,
        num_tokens,
        _spread(output.token_logprobs, rows, sampled.num_rows, np.float32),
        _spread(output.top_values, rows, sampled.num_rows, np.float32),
        _spread(output.top_ids, rows, sampled.num_rows, np.int32),
        _spread(output.chosen, rows, sampled.num_rows, np.float32),
        pieces,
        _failures(output, rows),
    )


def _failures(output: SampleOutput, rows: NDArray[np.int64]) -> list[tuple[int, RowFailure]]:
    nan = [] if output.nan_rows is None else np.flatnonzero(output.nan_rows.numpy()).tolist()
    return [(int(rows[row]), why) for row, why in [*output.failures, *((row, NUMERICAL_ERROR) for row in nan)]]


def _spread(tensor: torch.Tensor | None, rows: NDArray[np.int64], num_rows: int, dtype: type) -> NDArray | None:
    if tensor is None:
        return None
    spread = np.zeros((num_rows, *tensor.shape[1:]), dtype)
    spread[rows] = tensor.numpy()
    return spread
