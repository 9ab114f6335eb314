# SPDX-License-Identifier: MIT
"""Steps that prefill, captured in pieces: what lies between two attentions is a graph, attention itself is launched.

Launching a layer kernel by kernel takes the host longer than a small model's layer takes the GPU. Everything but
attention depends on the number of tokens alone, so it is captured for some numbers; a step of fewer tokens is padded
with tokens that write to block 0. Attention runs on the step's own rows, whatever they are. Larger steps keep the GPU
busy for longer than the host needs and run without. Captured at start, largest first, in one pool of memory with
the decode steps; used by the runner's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch

from tokenspeed.engine.kv_pool import KVCaches
from tokenspeed.engine.recorder import CudaRecorder, alias
from tokenspeed.layers.batch import Attend, ForwardBatch
from tokenspeed.models.model import Hidden

Cut = Callable[[torch.Tensor, Attend], torch.Tensor]
Step = Callable[[Cut], Hidden]
PlayPieces = Callable[[ForwardBatch, int], Hidden]


@dataclass(frozen=True, slots=True)
class CutBatch(ForwardBatch):
    """A batch whose layers are cut where they attend."""

    cut: Cut

    def attend(self, q: torch.Tensor, call: Attend) -> torch.Tensor:
        return self.cut(q, call)


class PieceRecorder(Protocol):
    """How a step is captured: `CudaPieces` on a GPU; on a CPU the step is simply run again."""

    def record(self, step: Step) -> PlayPieces:
        """Play it with (the step, its number of tokens)."""


class RepeatingPieces:
    """Plays a step back by running it, with attention on the step that it is played with."""

    def record(self, step: Step) -> PlayPieces:
        def play(batch: ForwardBatch, num_tokens: int) -> Hidden:
            def cut(q: torch.Tensor, call: Attend) -> torch.Tensor:
                out = torch.full(q.shape, float("nan"), dtype=q.dtype)  # what padding holds must not matter
                out[:num_tokens] = call(q[:num_tokens], batch)
                return out

            return step(cut)

        return play


class CudaPieces:
    """A CUDA graph a piece, all in the recorder's pool. Between two captures nothing runs."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self._recorder = recorder

    def record(self, step: Step) -> PlayPieces:
        """Runs what is to be captured once first, without attention."""
        with torch.cuda.stream(self._recorder.stream):
            step(lambda q, _call: torch.empty(q.shape, dtype=q.dtype, device=q.device))
            self._recorder.stream.synchronize()
        pieces: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, Attend, torch.Tensor]] = []
        captures = self._recorder.captures()
        graph = next(captures)

        def cut(q: torch.Tensor, call: Attend) -> torch.Tensor:
            nonlocal graph
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            pieces.append((graph, alias(q, graph), call, alias(out, graph)))
            graph = next(captures)
            return out

        try:
            hidden = step(cut)
        finally:
            captures.close()
        last, left = graph, tuple(alias(tensor, graph) for tensor in hidden)

        def play(batch: ForwardBatch, num_tokens: int) -> Hidden:
            for piece, q, call, out in pieces:
                piece.replay()
                out[:num_tokens].copy_(call(q[:num_tokens], batch))
            last.replay()
            return left

        return play


class PieceModel(Protocol):
    def hidden(self, batch: ForwardBatch) -> Hidden: ...


class PrefillPieces:
    """`sizes`: numbers of tokens to capture, ascending."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self._sizes = np.array(sizes, np.int64)
        self._played: dict[int, PlayPieces] = {}
        self._inputs = torch.zeros((3, sizes[-1]), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def capture(self, model: PieceModel, example: ForwardBatch, caches: KVCaches, recorder: PieceRecorder) -> None:
        """Record every size, largest first. example: any step; its rows are never looked at. caches: what steps are
        played with may be longer, and begins at the same addresses."""
        for size in self._sizes[::-1].tolist():
            self._played[size] = recorder.record(self._step(model, example, caches, size))

    def fit(self, num_tokens: int) -> bool:
        """Whether there is a size for a step of so many tokens."""
        return num_tokens <= self._sizes[-1]

    def play(self, batch: ForwardBatch) -> Hidden:
        """`hidden` of the batch. Waits for nothing; the result is valid until the next step is played."""
        num_tokens = batch.token_ids.shape[0]
        size = int(self._sizes[np.searchsorted(self._sizes, num_tokens)])
        torch.stack((batch.token_ids, batch.positions, batch.slot_mapping), out=self._inputs[:, :num_tokens])
        if num_tokens < size:
            self._inputs[:, num_tokens:size] = 0  # token 0 at position 0, written to block 0
        return tuple(tensor[:num_tokens] for tensor in self._played[size](batch, num_tokens))

    def _step(self, model: PieceModel, example: ForwardBatch, caches: KVCaches, size: int) -> Step:
        ids, positions, slot_mapping = self._inputs[:, :size].unbind(0)
        rest = {field.name: getattr(example, field.name) for field in fields(ForwardBatch)}
        inputs = {"token_ids": ids, "positions": positions, "slot_mapping": slot_mapping, "kv_caches": caches}

        def step(cut: Cut) -> Hidden:
            return model.hidden(CutBatch(**(rest | inputs), cut=cut))

        return step


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """Numbers of tokens, a power of two and the middle to the next. Padding costs nothing: where it makes the device
    slower, the host would have been slower still."""
    sizes, size = [], 64
    while size < largest:
        sizes += [size, size + size // 2] if size >= 256 else [size]
        size *= 2
    return (*[size for size in sizes if size < largest], largest)
