# SPDX-License-Identifier: MIT
"""A whole `ts serve` (supervisor, engine, gateway) on a loopback port, for tests.

`Server` owns the process tree it starts: it waits for readiness with a bound, hands out the base URL, and ends the
tree by its own process id. It never reuses a port that something else listens on and never leaves a child behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.processes import free_port, python_environment

STARTUP_LIMIT_S = 180.0
STOP_LIMIT_S = 150.0


class Server:
    """One `ts serve` with the given extra flags; a context manager.

    Attributes: base_url (http://127.0.0.1:port), control_port, process (the supervisor), log_path
    (its stdout and stderr).
    """

    def __init__(self, *flags: str, model: str | None = None) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.control_port = free_port()
        self.folder = tempfile.TemporaryDirectory(prefix="ts-e2e-")
        self.log_path = Path(self.folder.name) / "serve.log"
        self._log = self.log_path.open("wb")
        positional = [model] if model is not None else []
        command = [sys.executable, "-m", "tokenspeed.cli.ts", "serve", *positional]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--control-port", str(self.control_port), *flags]
        # Children must find the packages the way this process did, whatever launcher set them up.
        env = python_environment(PYTHONUNBUFFERED="1")
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )

    def __enter__(self) -> Server:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> float:
        """Seconds from the start of the process to the first 200 of /readiness; raises with the log if it dies."""
        while time.monotonic() - self.started_at < STARTUP_LIMIT_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"ts serve ended with {self.process.returncode} before it was ready:\n{self.log()}")
            if self.status("/readiness") == 200:
                return time.monotonic() - self.started_at
            time.sleep(0.1)
        raise RuntimeError(f"ts serve was not ready after {STARTUP_LIMIT_S} s:\n{self.log()}")

    def status(self, path: str) -> int | None:
        """The HTTP status of GET `path`, or None when nothing answers."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, TimeoutError):
            return None

    def get_text(self, path: str) -> str:
        with urllib.request.urlopen(self.base_url + path, timeout=30) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """POST `body` (bytes as they are, anything else as JSON); the status and the decoded JSON answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return int(response.status), json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_LIMIT_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for the whole session after the limit; idempotent."""
        if self.process.poll() is None:
            self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
        self._log.close()
        self.folder.cleanup()
