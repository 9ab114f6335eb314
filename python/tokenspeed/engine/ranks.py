# SPDX-License-Identifier: MIT
"""What an engine asks of the ranks it shares a model with, while it is built and while it runs.

`Alone` is an engine of one rank, `leader.Leader` the first of several, `follower.Follower` any other. All ranks make
the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenspeed.engine.admission import Grammars
from tokenspeed.engine.arrivals import Arrivals, Transfers
from tokenspeed.engine.turns import Mirror, NoMirror
from tokenspeed.grammar import GrammarCompiler
from tokenspeed.parallel import Group

Choose = Callable[[Sequence[Any]], Any]


class Ranks(Protocol):
    """`group`: for the model's collectives. `mirror`: for the loop."""

    @property
    def group(self) -> Group: ...
    @property
    def mirror(self) -> Mirror: ...
    @property
    def transfers(self) -> Transfers:
        """Where carriers of KV blocks say what is over, and the loop hears it."""

    @property
    def leads(self) -> bool:
        """Whether requests and operators come here."""

    def agree(self, what: str, value: Any, choose: Choose) -> Any:
        """What the first rank chooses of every rank's value, by rank; on all of them. Values are JSON's.

        what: must be the same everywhere. Also where ranks wait for each other. Raises what a rank failed with.
        """

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, by rank, on the first one; nothing on the others, which do not wait. On any thread, while
        the engine runs. Raises the loss of a rank."""

    def does(self, name: str, operation: Callable[..., None]) -> None:
        """What another rank than the first does when its loop is told an operation of this name."""

    def grammars(self, compiler: GrammarCompiler) -> Grammars:
        """Whom admission asks for grammars."""

    def check(self) -> None:
        """Raise EngineFault when a rank is lost."""

    def cause(self, error: BaseException) -> BaseException:
        """Why the loop failed: `error`, or the loss of a rank, which only breaks what a loop happens to be doing."""

    def close(self) -> None:
        """The others end too; nothing may be in flight. May be called twice."""


class Alone:
    """One rank."""

    group = Group()
    mirror = NoMirror()
    leads = True

    def __init__(self) -> None:
        self.transfers = Arrivals(1, self.check)

    def agree(self, what: str, value: Any, choose: Choose) -> Any:
        return choose([value])

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value]

    def does(self, name: str, operation: Callable[..., None]) -> None:
        return

    def grammars(self, compiler: GrammarCompiler) -> Grammars:
        return compiler

    def check(self) -> None:
        return

    def cause(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        return


def first(values: Sequence[Any]) -> Any:
    """The first rank's."""
    return values[0]
