# SPDX-License-Identifier: MIT
"""Ranks on several machines: the first one's engine waits for those of the others, and a node that has only others.

The first machine listens at `--dist-init-addr` for collectives and at the port behind it for ranks. Another machine
dials twice for each of its ranks, says which rank and which model, and hands both connections to a process of the rank
(`engine/follower.py`), which is told everything else by the first. The addresses belong on a private network, as those
of collectives do: there is no password. When the engine is lost, nodes dial again: a supervisor may start another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tokenspeed.config.flags import FlagError
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.parallel import ParallelConfig
from tokenspeed.config.resolve import Config
from tokenspeed.engine.errors import EngineFault
from tokenspeed.engine.leader import Peer
from tokenspeed.engine.processes import start_module
from tokenspeed.engine.rank_link import Orders, ReportReader
from tokenspeed.parallel.join import START_LIMIT_S

logger = logging.getLogger("tokenspeed.engine")

_ROLES = ("orders", "reports")
_HELLO_S = 10.0
_REDIAL_S = 0.5
_POLL_S = 0.05
_LONGEST_HELLO = 4096


def model_facts(config: Config, model_config: ModelConfig) -> str:
    """What every node must agree on before anything is loaded, as one short word."""
    facts = (config.parallel.tensor_size, config.parallel.num_nodes, config.loader.load_format, model_config)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


class RankDoor:
    """The first machine's end: listens from construction to `close`. Raises FlagError for a taken port."""

    def __init__(self, parallel: ParallelConfig, facts: str) -> None:
        self._facts = facts
        self._parallel = parallel
        self._waiting: dict[tuple[int, str], socket.socket] = {}
        try:
            self._socket = socket.create_server(("", parallel.init_port + 1))
        except OSError as error:
            raise FlagError("--dist-init-addr", f"port {parallel.init_port + 1}: {error.strerror}") from None

    def peers(self) -> list[Peer]:
        """The ranks of all other machines, once they are there. Raises EngineFault for one that does not come, and
        FlagError for one that serves something else."""
        first = len(self._parallel.devices)
        expected = range(first, self._parallel.tensor_size)
        deadline_s = time.monotonic() + START_LIMIT_S
        while any((rank, role) not in self._waiting for rank in expected for role in _ROLES):
            self._socket.settimeout(max(0.0, deadline_s - time.monotonic()))
            try:
                connection, address = self._socket.accept()
            except (TimeoutError, BlockingIOError):
                missing = [rank for rank in expected if (rank, "orders") not in self._waiting]
                raise EngineFault(f"ranks {missing} did not come to port {self._parallel.init_port + 1}") from None
            self._welcome(connection, str(address[0]), expected)
        return [self._peer(rank) for rank in expected]

    def close(self) -> None:
        self._socket.close()

    def _welcome(self, connection: socket.socket, where: str, expected: range) -> None:
        hello = _read_hello(connection)
        rank, role = hello.get("rank"), hello.get("role")
        if not isinstance(rank, int) or rank not in expected or role not in _ROLES:
            logger.warning("whoever dialled from %s is no rank of this engine", where)
            connection.close()
            return
        if hello.get("facts") != self._facts:
            raise FlagError("--node-rank", f"the rank at {where} was started with another model or other sizes")
        # A node that dials again has forgotten what it said before.
        self._waiting[rank, str(role)] = connection

    def _peer(self, rank: int) -> Peer:
        orders, reports = (self._waiting[rank, role] for role in _ROLES)
        timeout_s = self._parallel.timeout_s
        first_word_s = time.monotonic() + max(0.0, START_LIMIT_S - timeout_s)
        return Peer(rank, Orders(orders, timeout_s), ReportReader(reports), None, first_word_s)


def _read_hello(connection: socket.socket) -> dict[str, Any]:
    """What whoever dialled says first; {} for nonsense."""
    connection.settimeout(_HELLO_S)
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO:
            part = connection.recv(1)  # what follows belongs to the rank
            if not part:
                return {}
            line += part
        hello = json.loads(line)
    except (OSError, ValueError):
        return {}
    return hello if isinstance(hello, dict) else {}


class Node:
    """A machine that has only other ranks."""

    def __init__(self, config: Config, source: ModelSource, model_config: ModelConfig) -> None:
        self._parallel = config.parallel
        self._source = source
        self._facts = model_facts(config, model_config)
        self._stopping = False
        self.is_joined = False
        """Whether our ranks are part of an engine; may be read by any thread."""

    def run(self) -> int:
        """Serve until the first rank stops or a signal (0), or until it does not come back (1)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while not self._stopping:
            processes = self._started()
            if processes is None:
                return 0 if self._stopping else 1
            self.is_joined = True
            statuses = self._watched(processes)
            self.is_joined = False
            if not any(statuses):
                return 0
            logger.warning("the engine is lost; dialling its first rank again (exit statuses %s)", statuses)
        return 0

    def _started(self) -> list[subprocess.Popen[bytes]] | None:
        """A process for each of our ranks; None when the first rank does not answer."""
        processes: list[subprocess.Popen[bytes]] = []
        for index, device in enumerate(self._parallel.devices):
            links = [self._dialled(self._parallel.first_rank + index, role) for role in _ROLES]
            if any(link is None for link in links):
                _end_all(processes)
                return None
            processes.append(self._process(device, [link for link in links if link is not None]))
        return processes

    def _process(self, device: str, links: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
        numbers = [link.fileno() for link in links]
        place = (device, self._source.kind, str(self._source.path), self._source.name)
        process = start_module("tokenspeed.engine.follower", numbers, *place)
        for link in links:
            link.close()
        return process

    def _dialled(self, rank: int, role: str) -> socket.socket | None:
        address = (self._parallel.init_host or "", self._parallel.init_port + 1)
        deadline_s = time.monotonic() + START_LIMIT_S
        while not self._stopping and time.monotonic() < deadline_s:
            try:
                connection = socket.create_connection(address, _HELLO_S)
                hello = {"rank": rank, "role": role, "facts": self._facts}
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(None)
                return connection
            except OSError:
                time.sleep(_REDIAL_S)
        if not self._stopping:
            logger.error("no first rank answers at %s:%d", *address)
        return None

    def _watched(self, processes: list[subprocess.Popen[bytes]]) -> list[int]:
        """Wait for the end of any, and end the others; their statuses."""
        while not self._stopping and all(process.poll() is None for process in processes):
            time.sleep(_POLL_S)
        if not self._stopping and all(process.poll() in (0, None) for process in processes):
            for process in processes:  # the first rank said stop: all of them hear it
                try:
                    process.wait(_HELLO_S)
                except subprocess.TimeoutExpired:
                    break
        return _end_all(processes)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True


def _end_all(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    for process in processes:
        if process.poll() is None:
            process.kill()
    return [process.wait() for process in processes]
