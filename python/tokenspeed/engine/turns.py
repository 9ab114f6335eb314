# SPDX-License-Identifier: MIT
"""What makes the ranks of one engine plan the same steps: the first rank's turns, told to the others in order.

Scheduler, loop and sampler are functions of what they are told: commands, which grammars are compiled by when, which
copies of KV are over, and what operators did between two turns. The first rank decides all of it by its clock and its
sockets and says so before it plans; the others repeat it. So requests cross between ranks and plans never do. Both
sides keep a `Digest` of what they planned and drew, and the one of the turns before travels with each turn.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.engine.arrivals import News
from tokenspeed.engine.messages import Abort, AbortAll, Add, Command, Control, End
from tokenspeed_cc import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the first rank knows of a constraint: compiled, or why not. request_id: of the request that waits."""

    request_id: int
    error: str
    status: int
    """As HTTP has it; 0 for a grammar that is there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the loop that has anything to do: what arrived, what is known of constraints by now, and which copies
    of KV are over on all ranks."""

    commands: Sequence[Command]
    verdicts: Sequence[Verdict]
    news: News


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of the loop that was called between two turns."""

    name: str
    arguments: tuple[Any, ...]


class Mirror(Protocol):
    """How the loop tells the other ranks. Called on the loop's thread."""

    def operated(self, name: str, *arguments: Any) -> None:
        """A method of the loop is being called between two turns."""

    def turn(self, commands: Sequence[Command], verdicts: Sequence[Verdict], news: News) -> None:
        """A turn is about to plan."""

    def planned(self, plan: Plan) -> None: ...

    def settled(self, token_ids: NDArray[np.int32]) -> None: ...


class NoMirror:
    """The loop has nobody to tell."""

    def operated(self, name: str, *arguments: Any) -> None:
        return

    def turn(self, commands: Sequence[Command], verdicts: Sequence[Verdict], news: News) -> None:
        return

    def planned(self, plan: Plan) -> None:
        return

    def settled(self, token_ids: NDArray[np.int32]) -> None:
        return


class Digest:
    """A number that differs when plans or tokens did. A few microseconds a step."""

    def __init__(self) -> None:
        self.value = 0

    def planned(self, plan: Plan) -> None:
        """Take in which rows a step has, how long they are, and where their blocks are."""
        columns = (plan.request_ids, plan.slots, plan.query_lens, plan.context_lens, plan.table_updates)
        for column in columns:
            self._take(column)

    def settled(self, token_ids: NDArray[np.int32]) -> None:
        """Take in a step's tokens."""
        self._take(token_ids)

    def _take(self, column: NDArray[Any]) -> None:
        self.value = zlib.crc32(np.ascontiguousarray(column).data, self.value)


def for_others(commands: Sequence[Command]) -> list[Command]:
    """The commands as another rank needs them: it answers nobody."""
    told: list[Command] = []
    for command in commands:
        if isinstance(command, (Add, Abort, End, AbortAll)):
            told.append(command)
        elif isinstance(command, Control):
            told.append(Control(command.method, command.args, _no_reply))
    return told


def _no_reply(_success: bool, _message: str) -> None:
    return
