# SPDX-License-Identifier: MIT
"""Several replicas of one engine, each a process that dials the same gateway: started together, ended together.

Runs on the main thread of `ts serve --headless --data-parallel-size N`. Replicas share nothing but the lane, which is
ready when all are there and lost with any of them; so the end of one is the end of all, and the supervisor starts all
again.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from tokenspeed.cli._proc import Child, describe_status

_POLL_S = 0.05
_STOP_S = 10.0


class Replicas:
    """`arguments`: of python, for one of them; its number is added."""

    def __init__(self, arguments: Sequence[str], count: int) -> None:
        self._arguments = list(arguments)
        self._count = count
        self._stopping = False

    def run(self) -> int:
        """Until a signal (0), or until one of them has ended (its status)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        children = [self._start(rank) for rank in range(self._count)]
        try:
            while not self._stopping:
                for rank, child in enumerate(children):
                    status = child.poll()
                    if status is not None:
                        child.end(0)
                        print(f"replica {rank} ended ({describe_status(status)}); the others end with it", flush=True)
                        return status if status > 0 else 1
                time.sleep(_POLL_S)
            return 0
        finally:
            for child in children:
                child.terminate()
            deadline_s = time.monotonic() + _STOP_S
            for child in children:
                child.end(max(0.0, deadline_s - time.monotonic()))

    def _start(self, rank: int) -> Child:
        return Child(f"replica {rank}", [*self._arguments, "--data-parallel-rank", str(rank)], sys.stdout)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True
