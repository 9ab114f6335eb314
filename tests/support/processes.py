# SPDX-License-Identifier: MIT
"""What tests share that start processes or wait for other threads: a free port, an environment, patience."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on at the moment of asking."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def python_environment(**more: str) -> dict[str, str]:
    """For a child that finds packages the way this process does, whatever launcher set them up."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def wait_until(condition: Callable[[], object], limit_s: float = 60.0, why: Callable[[], str] = lambda: "") -> None:
    """The limit is for what never comes: a machine that is busy with other tests is slow, not wrong.

    why: asked for more words when it has not come.
    """
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not happen in {limit_s:g} s {why()}"
        time.sleep(0.01)
