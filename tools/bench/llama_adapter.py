# SPDX-License-Identifier: MIT
"""llama.cpp behind the benchmark's one call, through the C functions of llama-cpp-python, scheduled as its server does.

Slots hold one sequence each. A step has one token of every slot that decodes, then prompt tokens of others up to the
batch size; a request goes to the free slot whose last sequence shares the longest beginning with its prompt, and
computes only the rest. Greedy: the largest logit.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.engine_adapters import Batch, gguf_of

_STEP_TOKENS = 512


@dataclass
class Slot:
    """tokens: all that its sequence holds or is to hold; computed: how many of them it holds."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    request: int | None = None
    due: int = 0
    """Tokens that the request still wants."""


class Slots:
    """Which sequence does what next; knows no library."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot() for _ in range(count)]

    @property
    def busy(self) -> bool:
        return any(slot.request is not None for slot in self.slots)

    def place(self, request: int, prompt: list[int], new_tokens: int) -> int | None:
        """The slot that takes the request, its computed beginning kept; None when all are taken."""
        free = [index for index, slot in enumerate(self.slots) if slot.request is None]
        if not free:
            return None
        best = max(free, key=lambda index: shared(self.slots[index].tokens[: self.slots[index].computed], prompt))
        slot = self.slots[best]
        # The last token is computed again: its logits are what is wanted.
        slot.computed = min(shared(slot.tokens[: slot.computed], prompt), len(prompt) - 1)
        slot.tokens, slot.request, slot.due = list(prompt), request, new_tokens
        return best

    def step(self, most: int) -> list[tuple[int, int, int]]:
        """(slot, first token, last token + 1) of the next step: who decodes comes first."""
        pieces: list[tuple[int, int, int]] = []
        waiting = sorted(
            (len(slot.tokens) - slot.computed > 1, index)
            for index, slot in enumerate(self.slots)
            if slot.request is not None
        )
        for _, index in waiting:
            slot = self.slots[index]
            end = min(len(slot.tokens), slot.computed + most)
            if end > slot.computed:
                pieces.append((index, slot.computed, end))
                most -= end - slot.computed
        return pieces


def shared(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    for index, (mine, theirs) in enumerate(zip(left, right)):
        if mine != theirs:
            return index
    return min(len(left), len(right))


class LlamaCpp:
    """options: "gguf", the file; "max_num_seqs" slots of "max_model_len" tokens; "num_threads"."""

    name = "llama.cpp"

    def __init__(self, shape: Path, options: Mapping[str, Any], device: str | None) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        self._api = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, None)
        threads = options.get("num_threads") or os.cpu_count() or 1
        slots = options.get("max_num_seqs", 1)
        of_model = llama_cpp.llama_model_default_params()
        of_model.n_gpu_layers = 0 if device == "cpu" else -1
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(gguf_of(options)), of_model)
        limits = llama_cpp.llama_context_default_params()
        limits.n_ctx, limits.n_seq_max = slots * options.get("max_model_len", 4096), slots
        limits.n_batch = limits.n_ubatch = _STEP_TOKENS
        limits.n_threads = limits.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, limits)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_STEP_TOKENS, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._slots = Slots(slots)
        self._computed = 0

    def generate(self, batch: Batch) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in batch.prompts]
        waiting = deque(range(len(batch.prompts)))
        while waiting or self._slots.busy:
            while waiting and self._admit(waiting[0], batch):
                waiting.popleft()
            self._step(outputs)
        return outputs

    def counters(self) -> dict[str, float]:
        return {"computed_tokens": float(self._computed)}

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _admit(self, request: int, batch: Batch) -> bool:
        index = self._slots.place(request, batch.prompts[request], batch.new_tokens[request])
        if index is None:
            return False
        self._api.llama_memory_seq_rm(self._memory, index, self._slots.slots[index].computed, -1)
        return True

    def _step(self, outputs: list[list[int]]) -> None:
        pieces, rows, at = self._slots.step(_STEP_TOKENS), [], 0
        for index, begin, end in pieces:
            slot = self._slots.slots[index]
            for position in range(begin, end):
                self._batch.token[at], self._batch.pos[at] = slot.tokens[position], position
                self._batch.n_seq_id[at], self._batch.seq_id[at][0] = 1, index
                self._batch.logits[at] = position == len(slot.tokens) - 1
                at += 1
            if end == len(slot.tokens):
                rows.append((index, at - 1))
            slot.computed = end
        self._batch.n_tokens = at
        self._computed += at
        status = self._api.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode failed: {status}")
        for index, row in rows:
            logits = np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, row), (self.vocab_size,))
            self._take(index, int(logits.argmax()), outputs)

    def _take(self, index: int, token: int, outputs: list[list[int]]) -> None:
        slot = self._slots.slots[index]
        assert slot.request is not None
        outputs[slot.request].append(token)
        slot.tokens.append(token)
        slot.due -= 1
        if not slot.due:
            slot.request = None
