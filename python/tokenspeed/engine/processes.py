# SPDX-License-Identifier: MIT
"""Processes that an engine starts, ranks and replicas: a module of ours, and what its end meant."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence

logger = logging.getLogger("tokenspeed.engine")


def start_module(module: str, fds: Sequence[int], *words: str) -> subprocess.Popen[bytes]:
    """`python -m module FDS WORDS`, which inherits these descriptors and sees the packages that we see."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-m", module, *map(str, fds), *words]
    return subprocess.Popen(command, env=environment, pass_fds=fds, stdin=subprocess.DEVNULL)


def end_process(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for its end, and make it come. May be called twice."""
    try:
        process.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ending(process: subprocess.Popen[bytes] | None) -> str:
    """How it ended, in words, once its connection closed. None: a process of another machine."""
    if process is None:
        return "its connection closed"
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "its connection closed"
    return f"exit status {status}" if status >= 0 else f"signal {-status}"


def end_now(error: Exception) -> None:
    """End this process, whose main thread waits for a device that waits for a rank that is gone. Nobody can be told;
    whoever is connected sees the connection end."""
    logger.critical("the engine ends: %s", error)
    logging.shutdown()
    os._exit(1)
