# SPDX-License-Identifier: MIT
"""What the user got wrong, as one line on stderr and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tokenspeed.config.flags import FlagError
from tokenspeed.config.model_error import ModelError

USAGE = 2
INTERRUPTED = 130
"""What shells say of a program that Ctrl-C ended."""


def reporting(command: str, run: Callable[[], int]) -> int:
    """Call `run`; a FlagError, a ModelError or a lack of memory becomes one line and status 2."""
    try:
        return run()
    except (FlagError, ModelError) as error:
        return _report(command, error)
    except ValueError as error:
        if type(error).__name__ != "OutOfMemory":  # of the engine, which commands do not import
            raise
        return _report(command, error)


def _report(command: str, error: Exception) -> int:
    print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return USAGE
