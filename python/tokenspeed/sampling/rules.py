# SPDX-License-Identifier: MIT
"""What the host must know a request's tokens for: rules that narrow which token may come next, one object a request.

A rule is told every token once, in order, and then narrows a bit mask (bit v % 32 of word v // 32 for token v).
`RequestRules` is all of a request's rules; `host_rules` keeps one a slot. Nothing here touches a device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("tokenspeed.sampling")

Mask = NDArray[np.int32]
Processor = Callable[[list[int], Any], Any]
"""(the request's new tokens so far, logits float32 [V]) -> logits, or None when they were changed in place."""


@dataclass(frozen=True)
class RowFailure:
    """Why a row has no token that could be given out, so that its request ends. `status` as HTTP has it; `code` is for
    programs; `field`: the parameter at fault, "" for none."""

    status: int
    code: str
    field: str
    message: str


NUMERICAL_ERROR = RowFailure(500, "numerical_error", "", "the model's logits for this request are not numbers (NaN)")
DEAD_END = RowFailure(
    400, "grammar_dead_end", "", "no token of this model's vocabulary continues the output within its grammar"
)
COSTLY_GRAMMAR = RowFailure(
    400, "grammar_too_costly", "", "the output's grammar is so ambiguous that matching it takes too long"
)
NOTHING_LEFT = RowFailure(
    400, "no_token_left", "allowed_token_ids", "allowed_token_ids, bad_token_ids and bad_words bar every token together"
)


class Matcher(Protocol):
    """A grammar's state; `grammar.Matcher` is one."""

    @property
    def is_terminated(self) -> bool: ...
    def accept(self, token_id: int) -> bool: ...
    def fill(self, row: Mask) -> None: ...


class Grammar(Protocol):
    """`grammar.CompiledGrammar`."""

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher: ...


class Rule(Protocol):
    @property
    def failure(self) -> RowFailure | None:
        """Why no token can come any more; only stop tokens are let through then, and none of them counts."""

    def accept(self, token_id: int) -> None:
        """The next token of the output."""

    def narrow(self, mask: Mask) -> None:
        """Clear the bits of tokens that may not come next."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """A mask with the bits of these tokens."""
    words = np.zeros(num_words(vocab_size), np.uint32)
    ids = np.fromiter(token_ids, np.int64)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)


class GrammarRule:
    """The output follows a grammar; after its end only stop tokens may come. `failure`: why it has no way on."""

    def __init__(self, matcher: Matcher, stops: Mask) -> None:
        self._matcher = matcher
        self._stops = stops
        self.failure: RowFailure | None = None

    def accept(self, token_id: int) -> None:
        if self.failure is not None or self._matcher.is_terminated:
            return
        if not self._matcher.accept(token_id):
            message = f"token {token_id} has no place in the grammar that let it through"
            logger.error("%s; its request ends", message)
            self.failure = RowFailure(500, "grammar_failed", "", message)

    def narrow(self, mask: Mask) -> None:
        if self.failure is None and not self._matcher.is_terminated:
            own = np.empty_like(mask)
            self._matcher.fill(own)
            if (own & mask).any():
                mask &= own
                return
            # A complete text ends, whatever else the request allows.
            if not (own & self._stops).any():
                self.failure = DEAD_END
        mask[:] = self._stops


class FixedRule:
    """The same tokens at every step."""

    failure = None

    def __init__(self, allowed: Mask) -> None:
        self._allowed = allowed

    def accept(self, token_id: int) -> None:
        return

    def narrow(self, mask: Mask) -> None:
        mask &= self._allowed


class BadSequences:
    """Sequences of two tokens and more that must not appear: the last token is barred after the others."""

    failure = None

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._sequences = sequences
        self._longest = max(map(len, sequences)) - 1
        self._recent: list[int] = []

    def accept(self, token_id: int) -> None:
        self._recent = [*self._recent, token_id][-self._longest :]

    def narrow(self, mask: Mask) -> None:
        words = mask.view(np.uint32)
        for *before, last in self._sequences:
            if self._recent[-len(before) :] == before:
                words[last // 32] &= ~np.uint32(1 << (last % 32))


class RequestRules:
    """One request's rules. `processor`: see `Processor`; it gets `output_ids`, which grow here."""

    def __init__(self, rules: Sequence[Rule], stops: Mask, processor: Processor | None) -> None:
        self._rules = list(rules)
        self._stops = stops
        self.processor = processor
        self.output_ids: list[int] = []
        self._failure: RowFailure | None = None

    @property
    def failure(self) -> RowFailure | None:
        """Why the request cannot go on."""
        return self._failure or next((rule.failure for rule in self._rules if rule.failure is not None), None)

    def accept(self, token_id: int) -> None:
        if self.processor is not None:
            self.output_ids.append(token_id)
        for rule in self._rules:
            rule.accept(token_id)

    def process(self, output_ids: list[int], logits: Any) -> Any:
        """The processor's logits. What it raises is its request's fault."""
        assert self.processor is not None
        try:
            changed = self.processor(output_ids, logits)
            return logits if changed is None else changed
        except Exception as error:
            logger.exception("a custom logit processor failed; its request ends")
            message = f"the logit processor raised {type(error).__name__}: {error}"
            self._failure = RowFailure(400, "processor_failed", "custom_logit_processor", message)
            self.processor = None
            return logits

    def fill(self, mask: Mask) -> bool:
        """Overwrite `mask`; True when only tokens that end the output are left."""
        mask[:] = -1
        for rule in self._rules:
            rule.narrow(mask)
        if not mask.any() and self.failure is None:
            self._failure = NOTHING_LEFT
        return bool(self._rules) and not (mask & ~self._stops).any()
