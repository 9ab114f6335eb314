# SPDX-License-Identifier: MIT
"""One engine and one gateway, watched: start both, wait until they are ready, end them in the right order.

Runs on the main thread and polls; two threads copy the children's lines. A child that dies takes the server down
with a message and a status that is not 0; nothing is restarted behind an operator's back, a service manager does
that. SIGTERM and SIGINT drain: the gateway first, then the engine, and whoever exceeds the limit is killed. A second
signal ends the waiting.
"""

from __future__ import annotations

import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from tokenspeed.cli._proc import Child, describe_status
from tokenspeed.cli.control import ControlServer
from tokenspeed.config.flags import FlagError
from tokenspeed.version import __version__

POLL_S = 0.05
ENGINE_STOP_S = 10.0
GATEWAY_SLACK_S = 5.0
"""How much longer than its own drain limit the gateway may take."""


@dataclass(frozen=True)
class SupervisorConfig:
    """`host`, `port`, `tls`: where the gateway listens. `control_port`: None for no control server."""

    host: str
    port: int
    tls: bool
    engine_startup_timeout_s: float
    gateway_startup_timeout_s: float
    drain_timeout_s: float
    control_port: int | None
    server_args: Mapping[str, Any]
    """What the control server tells about the flags."""

    @property
    def base_url(self) -> str:
        """Where a client on this machine finds the gateway."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "", "::", "[::]") else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class Supervisor:
    def __init__(
        self,
        config: SupervisorConfig,
        engine_arguments: Sequence[str],
        gateway_arguments: Sequence[str],
        out: IO[str],
    ) -> None:
        self._config = config
        self._engine_arguments = engine_arguments
        self._gateway_arguments = gateway_arguments
        self._out = out
        self._signals = 0

    def run(self) -> int:
        """Serve until a signal (0) or a death (not 0)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        started_s = time.monotonic()
        control = self._control_server()
        self._say("starting an engine and a gateway")
        engine = Child("engine", self._engine_arguments, self._out)
        gateway = Child("gateway", self._gateway_arguments, self._out)
        try:
            status = self._wait_ready(engine, gateway, started_s)
            if status is None:
                status = self._watch(engine, gateway)
            return status
        finally:
            self._stop(engine, gateway)
            if control is not None:
                control.close()

    def _control_server(self) -> ControlServer | None:
        port = self._config.control_port
        if port is None:
            return None
        facts = {"version": __version__, "base_url": self._config.base_url, "server_args": self._config.server_args}
        try:
            return ControlServer(port, self._config.base_url, lambda: {**self._config.server_args, **facts})
        except OSError as error:
            raise FlagError("--control-port", f"{port}: {error.strerror}") from None

    def _wait_ready(self, engine: Child, gateway: Child, started_s: float) -> int | None:
        """None once ready; otherwise the exit status."""
        listening = False
        while not self._signals:
            dead = self._death(engine, gateway)
            if dead is not None:
                return dead
            answer = self._probe()
            if answer == 200:
                self._say(f"ready in {time.monotonic() - started_s:.1f} s")
                self._say_how_to_try()
                return None
            listening = listening or answer is not None
            waited_s = time.monotonic() - started_s
            if not listening and waited_s > self._config.gateway_startup_timeout_s:
                self._say(f"the gateway did not listen within {waited_s:.0f} s (--gateway-startup-timeout)")
                return 1
            if waited_s > self._config.engine_startup_timeout_s:
                self._say(f"the engine was not ready within {waited_s:.0f} s (--engine-startup-timeout)")
                return 1
            time.sleep(POLL_S)
        return 0

    def _watch(self, engine: Child, gateway: Child) -> int:
        while not self._signals:
            dead = self._death(engine, gateway)
            if dead is not None:
                return dead
            time.sleep(POLL_S)
        return 0

    def _death(self, engine: Child, gateway: Child) -> int | None:
        """The status to exit with when a child has ended; says which and how."""
        for child, other in ((engine, gateway), (gateway, engine)):
            status = child.poll()
            if status is not None:
                child.end(0)
                self._say(f"the {child.tag} ended ({describe_status(status)}); stopping the {other.tag} too")
                return status if status > 0 else 1
        return None

    def _stop(self, engine: Child, gateway: Child) -> None:
        """Gateway first: its streams finish while the engine still serves them."""
        engine_is_alive = engine.poll() is None
        gateway.terminate()
        deadline_s = time.monotonic() + (
            self._config.drain_timeout_s + GATEWAY_SLACK_S if engine_is_alive else GATEWAY_SLACK_S
        )
        while gateway.poll() is None and time.monotonic() < deadline_s and self._signals < 2:
            time.sleep(POLL_S)
        gateway.end(0.0 if self._signals >= 2 or gateway.poll() is None else 1.0)
        engine.terminate()
        engine.end(0.0 if self._signals >= 2 else ENGINE_STOP_S)

    def _probe(self) -> int | None:
        """The status of the gateway's /readiness; None when nothing answers."""
        context = ssl._create_unverified_context() if self._config.tls else None  # a loopback probe of our own child
        try:
            with urllib.request.urlopen(f"{self._config.base_url}/readiness", timeout=2, context=context) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def _say_how_to_try(self) -> None:
        self._say(
            f"try: curl {self._config.base_url}/v1/chat/completions -H 'Content-Type: application/json' "
            """-d '{"temperature": 0, "max_tokens": 64, """
            """"messages": [{"role": "user", "content": "What is the capital of France?"}]}'"""
        )

    def _say(self, text: str) -> None:
        self._out.write(f"ts serve: {text}\n")
        self._out.flush()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1:
            self._say(f"{signal.Signals(number).name}: draining for at most {self._config.drain_timeout_s:.0f} s")
