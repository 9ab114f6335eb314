# SPDX-License-Identifier: MIT
"""Whose fault it is. A caller's or a request's error never stops the loop; an `EngineFault` ends the process.

`RequestError` (config.sampling) is the caller's: refused before any work. `EngineFault` is ours: an invariant does
not hold, so nothing that the engine holds can be trusted. `EngineDeadError` is what callers in the same process see
of it.
"""

from __future__ import annotations

from tokenspeed.config.flags import FlagError
from tokenspeed.config.model_error import ModelError


class EngineFault(RuntimeError):
    """An invariant of the engine is broken; the text says which, in words."""


class EngineDeadError(RuntimeError):
    """The engine stopped while a request was waiting, or before it was sent. The cause is chained."""


class OutOfMemory(ValueError):
    """The device cannot hold what was asked for; the text names the flag to change."""


class OperationError(Exception):
    """What an operator or a trainer asked for was refused, and nothing has changed. status: as HTTP has it; `RETRY` for
    what can be done later, by the same call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


RETRY = 409


START_ERRORS = (ModelError, FlagError, OutOfMemory)
"""What may be wrong with a command line, a checkpoint or a machine: said in one line, without a traceback."""


def error_of(kind: str, text: str) -> Exception | None:
    """An error that ended the start of another process, by its type's name; None for any that is not its caller's."""
    if kind == "FlagError":
        flag, _, why = text.partition(": ")
        return FlagError(flag, why)
    known: dict[str, type[Exception]] = {"ModelError": ModelError, "OutOfMemory": OutOfMemory}
    return known[kind](text) if kind in known else None
