# SPDX-License-Identifier: MIT
"""Whether a conversation's next prompt begins with the prompt and the answer before it, as a prefix cache wants it.

A turn is found again by the messages that it was asked with: those of the next request up to the answer. What is kept
is the tokens of each turn, in so much memory; the longest unused go first. Lives on the loop's thread.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_MAX_TOKENS, _MAX_TURNS = 16_777_216, 32_768
"""64 MiB of tokens, and some more for short turns."""
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True)
class Continuation:
    """`this`: the name of a turn. `before`: of the turn that it goes on with; None for a first one."""

    this: bytes
    before: bytes | None


@dataclass(frozen=True)
class Difference:
    """Of a prompt to the turn before it. position: of the first token that differs; `num_before` when none does."""

    position: int
    num_before: int

    @property
    def diverges(self) -> bool:
        """Some of the turn before is not there as it was."""
        return self.position < self.num_before


def continuation(messages: Sequence[Mapping[str, Any]]) -> Continuation:
    """What a request's messages make it."""
    digest, before = hashlib.blake2b(digest_size=16), None
    for i, message in enumerate(messages):
        if message.get("role") == "assistant" and i:
            before = digest.digest()
        digest.update(_encode(message) + b"\n")
    return Continuation(digest.digest(), before)


class Turns:
    """The turns that are remembered."""

    def __init__(self, max_tokens: int = _MAX_TOKENS, max_turns: int = _MAX_TURNS) -> None:
        self._max_tokens, self._max_turns = max_tokens, max_turns
        self._num_tokens = 0
        self._turns: OrderedDict[bytes, array[int]] = OrderedDict()

    def difference(self, turn: Continuation, prompt: Sequence[int]) -> Difference | None:
        """None for a first turn, or one that nothing is known of."""
        known = self._turns.get(turn.before) if turn.before is not None else None
        if known is None or turn.before is None:
            return None
        self._turns.move_to_end(turn.before)
        return Difference(_first_difference(known, array("I", prompt[: len(known)])), len(known))

    def remember(self, turn: Continuation, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A turn has ended."""
        tokens = array("I", prompt)
        tokens.extend(answer)
        old = self._turns.pop(turn.this, None)
        self._num_tokens += len(tokens) - (len(old) if old is not None else 0)
        self._turns[turn.this] = tokens
        while self._num_tokens > self._max_tokens or len(self._turns) > self._max_turns:
            self._num_tokens -= len(self._turns.popitem(last=False)[1])


def _first_difference(one: array[int], other: array[int]) -> int:
    """By halving: parts of arrays compare at the speed of memory."""
    same, length = 0, min(len(one), len(other))
    a, b = memoryview(one), memoryview(other)
    while same < length:
        half = max(1, (length - same) // 2)
        if a[same : same + half] == b[same : same + half]:
            same += half
        elif half == 1:
            break
        else:
            length = same + half
    return same
