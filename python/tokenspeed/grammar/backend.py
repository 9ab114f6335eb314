# SPDX-License-Identifier: MIT
"""What a grammar library is to us: it compiles a constraint once, and gives each request a matcher of its own.

Implementations: `xgrammar_backend`, `llguidance_backend`. `compile` runs in the compiler's threads and may take long;
a `Matcher` is used by one thread at a time and every call of it takes microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.config.constraint import Constraint


class GrammarError(ValueError):
    """The caller's fault: the constraint cannot be compiled. The text is the library's."""


@dataclass(frozen=True)
class TokenTable:
    """What libraries know of the model's tokens.

    tokens: the bytes that each id adds to the text, b"" for special tokens and padding; as many as the model has
    logits. special: id by text of the special tokens. eos: ids that end a text.
    """

    tokens: Sequence[bytes]
    special: Mapping[str, int]
    eos: tuple[int, ...]


class Matcher(Protocol):
    """The state of one output within its grammar."""

    @property
    def is_terminated(self) -> bool:
        """Whether a stop token was accepted; nothing may follow."""

    def accept(self, token_id: int) -> bool:
        """Take the next token; False when the grammar has no place for it, which leaves the state as it was."""

    def fill(self, row: NDArray[np.int32]) -> None:
        """Overwrite a mask: bit v % 32 of word v // 32 is set where token v may come next. Stop tokens may where the
        text is complete. Not after termination."""


class CompiledGrammar(Protocol):
    """Shared by all requests with the same constraint; immutable."""

    @property
    def num_bytes(self) -> int:
        """Memory, roughly; for the cache's bound."""

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the start of an output. stop_token_ids: tokens that end it, in place of the table's."""


def require_text(grammar: CompiledGrammar, table: TokenTable) -> CompiledGrammar:
    """The grammar. Raises GrammarError when no token can begin an output, so that no text at all satisfies it."""
    mask = np.zeros(-(-len(table.tokens) // 32), np.int32)
    grammar.matcher(table.eos).fill(mask)
    if not mask.any():
        raise GrammarError("no text satisfies it")
    return grammar


class Backend(Protocol):
    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """constraint: as `Constraint.prepared` gives it. Releases the interpreter's lock. Raises `GrammarError`."""
