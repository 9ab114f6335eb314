# SPDX-License-Identifier: MIT
"""Child processes of the supervisor: start, tag their lines, end them; and where their lane listens.

A child leads its own process group, so that Ctrl-C reaches the supervisor alone; it asks the kernel to be ended with
its parent, so that a killed supervisor leaves nobody behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

from tokenspeed.rpc.lane.address import zmq_handshake_port

__all__ = ["Child", "die_with_parent", "free_port", "fresh_worker_url", "zmq_handshake_port"]

PARENT_ENV = "TOKENSPEED_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


class Child:
    """One child process; its stdout and stderr appear on ours, a tag before each line."""

    def __init__(self, tag: str, arguments: Sequence[str], out: IO[str]) -> None:
        self.tag = tag
        env = dict(os.environ, PYTHONUNBUFFERED="1")
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        env[PARENT_ENV] = str(os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._copy_lines, args=(out,), name=f"{tag}-lines", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, timeout_s: float) -> int:
        """Wait for its end, kill it after `timeout_s`, and return the status once its last lines are out."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._pump.join(2.0)
        return self._process.returncode

    def kill(self) -> None:
        """End it and what it started, now."""
        if self.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _copy_lines(self, out: IO[str]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A child must not hang on a full pipe because nobody reads our lines any more.
            with contextlib.suppress(OSError, ValueError):
                out.write(f"[{self.tag}] {line.decode(errors='replace')}")
                out.flush()


def describe_status(status: int) -> str:
    """`exit status 1`, `signal SIGKILL`."""
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def die_with_parent() -> None:
    """In a child of the supervisor: ask for SIGTERM when it dies. Does nothing in a process started otherwise."""
    parent = os.environ.pop(PARENT_ENV, None)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)  # it died before we could ask


def free_port(count: int = 1) -> int:
    """A loopback port that nobody listens on now, nor on the `count` - 1 behind it."""
    for _ in range(100):
        with contextlib.ExitStack() as held:
            first = 0
            try:
                for index in range(count):
                    probe = held.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", first + index if index else 0))
                    first = first or int(probe.getsockname()[1])
                return first
            except (OSError, OverflowError):
                continue
    raise OSError(f"no {count} free loopback ports in a row")


def fresh_worker_url() -> str:
    """An `ipc://` worker URL of this user whose handshake port nobody listens on."""
    folder = os.path.join(tempfile.gettempdir(), f"tokenspeed-{os.getuid()}")
    for _ in range(100):
        url = f"ipc://{folder}/{os.getpid()}-{secrets.token_hex(4)}"
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", zmq_handshake_port(url)))
                return url
            except OSError:
                continue
    raise OSError("no free loopback port for the lane between gateway and engine")
