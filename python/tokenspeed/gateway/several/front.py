# SPDX-License-Identifier: MIT
"""The process in front of several gateways (`--gateway-workers N`): it owns the workers' lanes and the children.

Every child is a whole gateway on the same port (SO_REUSEPORT: the kernel deals out connections) and has, for each
worker, a private lane that a `Relay` of the `Roster` here dials. The first child starts alone: what keeps it from
serving is said once and is the status of all. A child that dies later is started again after a pause that doubles while
it keeps dying. SIGTERM and SIGINT are passed on; this process ends when the last child has drained.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

import zmq

from tokenspeed.config.gateway import GatewayConfig
from tokenspeed.config.member import Member
from tokenspeed.gateway.http.logs import LogsUnwritable, configure_logs
from tokenspeed.gateway.several.roster import Roster
from tokenspeed.gateway.start_error import StartError
from tokenspeed.rpc.lane.address import AddressError

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_S = 0.2, 30.0, 60.0
_PARENT_ENV = "TOKENSPEED_SUPERVISOR_PID"
"""A child that finds it asks the kernel to be ended with the process of that number (`cli._proc`)."""


def run(config: GatewayConfig, argv: Sequence[str]) -> int:
    """Serve until a signal; `argv` is the command line of every child. Returns the exit status."""
    try:
        configure_logs(config.logs)
    except LogsUnwritable as error:
        print(f"smg launch: error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ts-gw-") as folder:
        try:
            with _reserved(config) as port_holder:
                return asyncio.run(_Front(config, argv, folder, int(port_holder.getsockname()[1])).run())
        except StartError as error:
            if str(error):
                print(f"smg launch: error: {error}", file=sys.stderr)
            return error.status


def _reserved(config: GatewayConfig) -> socket.socket:
    """A socket that is bound and never listens: it settles the port, also where `--port 0` leaves it open."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _refuse_shared(config, family)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((config.host, config.port))
    except OSError as error:
        holder.close()
        raise StartError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}", 1) from None
    return holder


def _refuse_shared(config: GatewayConfig, family: int) -> None:
    """Raise `OSError` where another server has the port: SO_REUSEPORT alone would share its connections."""
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((config.host, config.port))


class _Front:
    """The children and what they share. Lives on the loop's thread."""

    def __init__(self, config: GatewayConfig, argv: Sequence[str], folder: str, port: int) -> None:
        self._config, self._argv = config, argv
        self._members = [Member(index, config.num_gateways, folder, port) for index in range(config.num_gateways)]
        self._roster = Roster(config, self._members)
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._num_signals = 0

    async def run(self) -> int:
        """The exit status: 0 after a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._roster.open()
        except (AddressError, zmq.ZMQError, OSError) as error:
            raise StartError(f"a worker's lane cannot be opened: {error}", 1) from None
        try:
            await self._first()
            async with asyncio.TaskGroup() as group:
                for member in self._members:
                    group.create_task(self._keep(member))
        finally:
            await self._roster.close()
        return 0

    def _on_signal(self) -> None:
        self._num_signals += 1
        for child in self._children.values():
            if child.returncode is None:
                child.send_signal(signal.SIGTERM)

    async def _first(self) -> None:
        """Start the first child and wait until it serves. Raises `StartError` with the child's status."""
        first = self._members[0]
        child = await self._start(first)
        while not first.door.exists():
            if child.returncode is not None and not self._num_signals:
                raise StartError("", child.returncode if child.returncode > 0 else 1)
            if self._num_signals:
                return
            await asyncio.sleep(_POLL_S)
        logger.info("%d gateway processes serve port %d", len(self._members), first.port)

    async def _start(self, member: Member) -> asyncio.subprocess.Process:
        environment = {**os.environ, **member.environment, _PARENT_ENV: str(os.getpid())}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = ("-m", "tokenspeed.cli.smg", "launch", *self._argv)
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        child = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        self._children[member.index] = child
        if self._num_signals:
            child.send_signal(signal.SIGTERM)
        return child

    async def _keep(self, member: Member) -> None:
        """Watch a child, and start it again, until a shutdown; then wait for its end."""
        pause_s = _FIRST_PAUSE_S
        child = self._children.get(member.index)
        while not self._num_signals or child is not None:
            begun_s = time.monotonic()
            child = child or await self._start(member)
            status = await child.wait()
            child = None
            if self._num_signals:
                return
            pause_s = _FIRST_PAUSE_S if time.monotonic() - begun_s > _HEALTHY_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            logger.error("gateway process %d ended with status %d; it starts again", member.index, status)
            until_s = time.monotonic() + pause_s
            while time.monotonic() < until_s and not self._num_signals:
                await asyncio.sleep(_POLL_S)
