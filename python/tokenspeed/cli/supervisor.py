# SPDX-License-Identifier: MIT
"""One engine and one gateway, watched: start both, wait until they are ready, end them in the right order.

Runs on the main thread and polls; two threads copy the children's lines. A child that dies once the server was ready
is started again after a pause that doubles; the gateway answers 503 while there is no engine. A child that dies before
the server was ready, or more often than `--engine-restarts` allows, takes the server down with its status. SIGTERM and
SIGINT drain: the gateway first, then the engine, and whoever exceeds the limit is killed. A second signal ends the
waiting: streams end with an error. A third one kills.
"""

from __future__ import annotations

import contextlib
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
from tokenspeed.config.restarts import Restarts
from tokenspeed.version import __version__

POLL_S = 0.05
ENGINE_STOP_S = 10.0
HURRY_S = 2.0
"""What either child has left after a second signal; a third one kills both at once."""
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
    max_restarts: int
    engine_urls: tuple[str, ...]
    """The own HTTP port of each replica of the engine."""
    control_port: int | None
    control_is_asked: bool
    """Whether the user named the port: then it must be had."""
    control_key: str | None
    gateway_key: str | None
    """One that the gateway takes; None where it asks for none."""
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
        self._restarts = Restarts(config.max_restarts)

    def run(self) -> int:
        """Serve until a signal (0) or a death (not 0)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        started_s = time.monotonic()
        control = self._control_server()
        self._say("starting an engine and a gateway")
        self._engine = self._start("engine")
        self._gateway = self._start("gateway")
        try:
            status = self._wait_ready(started_s)
            if status is None:
                self._say_how_to_try()
                status = self._watch()
            return status
        finally:
            self._stop(self._engine, self._gateway)
            if control is not None:
                control.close()

    def _start(self, tag: str) -> Child:
        arguments = self._engine_arguments if tag == "engine" else self._gateway_arguments
        return Child(tag, arguments, self._out)

    def _control_server(self) -> ControlServer | None:
        port = self._config.control_port
        if port is None:
            return None
        facts = {"version": __version__, "base_url": self._config.base_url, "server_args": self._config.server_args}
        try:
            return ControlServer(
                port,
                self._config.base_url,
                self._config.engine_urls,
                self._config.control_key,
                self._config.gateway_key,
                lambda: {**self._config.server_args, **facts},
            )
        except OSError as error:
            if self._config.control_is_asked:
                raise FlagError("--control-port", f"{port}: {error.strerror}") from None
            self._say(f"no control server: port {port}: {error.strerror} (--control-port)")
            return None

    def _wait_ready(self, started_s: float) -> int | None:
        """None once ready; otherwise the exit status."""
        listening = False
        while not self._signals:
            dead = self._dead()
            if dead is not None:
                return self._give_up(dead)
            answer = self._probe()
            if answer == 200:
                self._say(f"ready in {time.monotonic() - started_s:.1f} s")
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

    def _watch(self) -> int:
        """Until a signal (0), or until a child has died too often (its status)."""
        down_since_s: float | None = None
        while not self._signals:
            dead = self._dead()
            if dead is not None:
                down_since_s = down_since_s or time.monotonic()
                if not self._restarted(dead):
                    return self._give_up(dead)
            elif down_since_s is not None and self._probe() == 200:
                self._say(f"ready again after {time.monotonic() - down_since_s:.1f} s")
                down_since_s = None
            time.sleep(POLL_S)
        return 0

    def _dead(self) -> Child | None:
        """A child that has ended, its last lines out."""
        for child in (self._engine, self._gateway):
            if child.poll() is not None:
                child.end(0)
                return child
        return None

    def _restarted(self, dead: Child) -> bool:
        """Start another in its place, after a pause; False when that was done often enough, or a signal came."""
        pause_s = self._restarts.pause_s(time.monotonic())
        if pause_s is None:
            return False
        self._say(f"the {dead.tag} ended ({_describe(dead)}); starting another in {pause_s:g} s")
        deadline_s = time.monotonic() + pause_s
        while time.monotonic() < deadline_s and not self._signals:
            time.sleep(POLL_S)
        if not self._signals:
            if dead is self._engine:
                self._engine = self._start("engine")
            else:
                self._gateway = self._start("gateway")
        return True

    def _give_up(self, dead: Child) -> int:
        """The status to exit with; says which child ended, and how."""
        other = self._gateway if dead is self._engine else self._engine
        spent = " for good (--engine-restarts)" if self._restarts.are_spent else ""
        self._say(f"the {dead.tag} ended ({_describe(dead)}){spent}; stopping the {other.tag} too")
        status = dead.poll() or 1
        return status if status > 0 else 1

    def _stop(self, engine: Child, gateway: Child) -> None:
        """Gateway first: its streams finish while the engine still serves them."""
        engine_is_alive = engine.poll() is None
        gateway.terminate()
        deadline_s = time.monotonic() + (
            self._config.drain_timeout_s + GATEWAY_SLACK_S if engine_is_alive else GATEWAY_SLACK_S
        )
        hurried = False
        while gateway.poll() is None and time.monotonic() < deadline_s and self._signals < 3:
            if self._signals == 2 and not hurried:
                hurried = True
                gateway.terminate()  # its second signal too: what is open ends with an error that clients can read
                deadline_s = min(deadline_s, time.monotonic() + HURRY_S)
            time.sleep(POLL_S)
        gateway.end(0.0 if gateway.poll() is None else 1.0)
        engine.terminate()
        engine.end(HURRY_S if self._signals == 2 else 0.0 if self._signals > 2 else ENGINE_STOP_S)

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
        with contextlib.suppress(OSError):  # nobody reads: serving goes on
            self._out.write(f"ts serve: {text}\n")
            self._out.flush()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals == 1:
            self._say(f"{name}: draining for at most {self._config.drain_timeout_s:g} s")
        elif self._signals == 2:
            self._say(f"{name} again: ending what is open")


def _describe(child: Child) -> str:
    status = child.poll()
    assert status is not None
    return describe_status(status)
