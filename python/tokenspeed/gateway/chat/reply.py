# SPDX-License-Identifier: MIT
"""One choice's text on its way through the parsers of reasoning and tool calls, as a pure machine over pieces.

It gives calls their ids, keeps one call where parallel calls are off, counts reasoning tokens, and knows at the end
whether calls were made. Pieces go in as `Choice` gives them and come out with events in place of text.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tokenspeed.gateway.chat.choice import Piece
from tokenspeed.gateway.text.parse.events import CallArguments, CallStart, Event, Text, Thought
from tokenspeed.gateway.text.parse.output import TextMachine


@dataclass(frozen=True)
class ReplyRules:
    """make: the machine of one choice. parallel: more calls than one are let through. stream_reasoning: reasoning is
    given while it comes, not whole at its end."""

    make: Callable[[], TextMachine]
    parallel: bool
    stream_reasoning: bool


class Reply:
    """The machine of one choice."""

    def __init__(self, rules: ReplyRules) -> None:
        self.num_reasoning_tokens = 0
        self._rules = rules
        self._machine = rules.make()
        self._made_call = False
        self._held_thought = ""

    def pass_on(self, piece: Piece) -> Piece:
        """The piece with its text as events; at the end, the reason tells of calls."""
        thinking = self._machine.thinking
        events = self._machine.feed(piece.text) if piece.text else []
        if piece.finish:
            events = events + self._machine.close()
        self.num_reasoning_tokens += _num_thought(piece, events, thinking, self._machine.thinking)
        shown = self._shown(events, bool(piece.finish))
        finish = "tool_calls" if piece.finish == "stop" and self._made_call else piece.finish
        return replace(piece, text="", events=shown, finish=finish)

    def _shown(self, events: Sequence[Event], final: bool) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            match event:
                case Thought() if not self._rules.stream_reasoning:
                    self._held_thought += event.text
                    continue
                case CallStart() | CallArguments() if event.index and not self._rules.parallel:
                    continue
                case CallStart():
                    self._made_call = True
                    call_id = event.id or f"call_{secrets.token_hex(12)}"
                    shown += [*self._thought(), CallStart(event.index, event.name, call_id)]
                case Text():
                    shown += [*self._thought(), event]
                case _:
                    shown.append(event)
        return shown + self._thought() if final else shown

    def _thought(self) -> list[Event]:
        held, self._held_thought = self._held_thought, ""
        return [Thought(held)] if held else []


def _num_thought(piece: Piece, events: Sequence[Event], before: bool, after: bool) -> int:
    """How many of the piece's tokens are reasoning. A step is one token as a rule; of a longer piece that leaves the
    block, the share of its text counts."""
    num_tokens = len(piece.token_ids)
    if before and after:
        return num_tokens
    thought = sum(len(event.text) for event in events if isinstance(event, Thought))
    if not (before or after or thought):
        return 0
    return min(num_tokens, math.ceil(num_tokens * thought / max(1, len(piece.text)))) if num_tokens > 1 else num_tokens
