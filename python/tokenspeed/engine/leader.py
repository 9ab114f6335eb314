# SPDX-License-Identifier: MIT
"""The first rank of several: starts the others, tells them its turns, watches that they live.

Orders are sent by the thread that builds and then by the loop's. A thread of its own (`ranks`) reads what the others
report: agreement, faults, a sign of life a second. A rank that ends, reports a fault, or says nothing for too long, and
a step that nobody finishes, is the loss of the engine: callers learn it by an exception of their next call, and where
the thread that would call waits for a device, `on_loss` is called after a moment. No rank is ever replaced alone.
"""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.config.flags import FlagError
from tokenspeed.config.hardware import Hardware
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.resolve import Config, DeviceConfig
from tokenspeed.engine.admission import Grammars
from tokenspeed.engine.arrivals import QUIET, Arrivals, News
from tokenspeed.engine.errors import EngineFault, error_of
from tokenspeed.engine.messages import Command
from tokenspeed.engine.processes import end_process, ending, start_module
from tokenspeed.engine.rank_link import Kind, LinkLost, Orders, ReportReader
from tokenspeed.engine.ranks import Choose
from tokenspeed.engine.turns import Digest, Operation, Turn, Verdict, for_others
from tokenspeed.grammar import GrammarCompiler
from tokenspeed.kvstore import Moved
from tokenspeed.parallel.join import START_LIMIT_S, Meeting, Opened, join
from tokenspeed_cc import Plan

logger = logging.getLogger("tokenspeed.engine")

_LOOPBACK = "127.0.0.1"
_WATCH_S = 0.25
_POLL_S = 0.02
_NOTICE_S = 0.5
"""That the thread which serves has to see a loss by itself, and to end in its own words."""
_CAUSE_S = 1.5
"""From the failure of a collective until the kernel has told that a rank is gone, with room."""
_END_S = 10.0


@dataclass(frozen=True)
class Setup:
    """All that a rank has to know."""

    config: Config
    source: ModelSource
    model_config: ModelConfig
    hardware: Hardware
    rank: int
    meeting: Meeting


@dataclass
class Peer:
    """Another rank. process: None on another machine. heard_s: when it gave a sign of life; ahead of the clock while a
    new process has time for its first one."""

    rank: int
    orders: Orders
    reader: ReportReader
    process: subprocess.Popen[bytes] | None
    heard_s: float


class Leader:
    """`Ranks` of the first one; see there."""

    leads = True

    def __init__(self, peers: Sequence[Peer], timeout_s: float) -> None:
        self.on_loss: Callable[[Exception], None] = _nothing
        self._peers = list(peers)
        self._timeout_s = timeout_s
        self._digest = Digest()
        self._values: queue.SimpleQueue[tuple[int, str, Any] | None] = queue.SimpleQueue()
        self._loss: Exception | None = None
        self._lost = threading.Event()
        self._noticed = threading.Event()
        self._closing = False
        self.transfers = Arrivals(len(self._peers) + 1, self.check)
        self._num_in_flight = 0
        self._progress_s = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def join(self, opened: Opened, device: DeviceConfig) -> None:
        """Meet the others for collectives. Raises what a rank failed with."""
        self._opened = opened
        try:
            self.group = join(
                opened.meeting,
                0,
                len(self._peers) + 1,
                torch.device(device.device),
                device.deterministic,
                self._timeout_s,
            )
        except RuntimeError as error:
            self.check()
            raise EngineFault(f"the ranks did not find each other: {error}") from None

    @property
    def mirror(self) -> Leader:
        return self

    def agree(self, what: str, value: Any, choose: Choose) -> Any:
        chosen = choose(self.gather(what, value))
        self._send(Kind.ANSWER, chosen)
        return chosen

    def gather(self, what: str, value: Any) -> list[Any]:
        values = {0: value}
        while len(values) <= len(self._peers):
            told = self._values.get()
            self.check()
            if told is None:
                raise EngineFault("the engine has stopped")
            rank, about, found = told
            if about != what:
                raise EngineFault(f"rank {rank} is at {about!r} and the first one at {what!r}")
            values[rank] = found
        return [values[rank] for rank in range(len(values))]

    def does(self, name: str, operation: Callable[..., None]) -> None:
        return

    def grammars(self, compiler: GrammarCompiler) -> Grammars:
        return compiler

    def check(self) -> None:
        if self._loss is not None:
            self._noticed.set()
            raise self._loss

    def cause(self, error: BaseException) -> BaseException:
        self._noticed.set()
        self._lost.wait(_CAUSE_S)
        return self._loss or error

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._noticed.set()
        self._values.put(None)  # for who still waits
        for peer in self._peers:
            try:
                peer.orders.send(Kind.STOP, None)
            except LinkLost:
                pass
        self._watcher.join(2 * _WATCH_S)
        deadline_s = time.monotonic() + (_END_S if self._loss is None else 0.0)
        for peer in self._peers:
            if peer.process is not None:
                end_process(peer.process, deadline_s - time.monotonic())
            else:
                _hear_the_end(peer.reader, deadline_s)
        for peer in self._peers:
            peer.orders.close()
            peer.reader.socket.close()

    # ---- the mirror ------------------------------------------------------------------------------------------------

    def operated(self, name: str, *arguments: Any) -> None:
        self._send(Kind.OPERATION, Operation(name, arguments))

    def turn(self, commands: Sequence[Command], verdicts: Sequence[Verdict], news: News) -> None:
        told = for_others(commands)
        self._send(Kind.TURN, Turn(told, verdicts, news) if told or verdicts or news != QUIET else None)

    def planned(self, plan: Plan) -> None:
        self._digest.planned(plan)
        if not self._num_in_flight:
            self._progress_s = time.monotonic()
        self._num_in_flight += 1

    def settled(self, token_ids: NDArray[np.int32]) -> None:
        self._digest.settled(token_ids)
        self._num_in_flight -= 1
        self._progress_s = time.monotonic()

    def _send(self, kind: Kind, content: Any) -> None:
        self.check()
        for peer in self._peers:
            try:
                peer.orders.send(kind, content, self._digest.value)
            except LinkLost as error:
                self._noticed.set()
                raise self._loss or EngineFault(f"rank {peer.rank} is gone: {error}") from None

    # ---- the watch -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for peer in self._peers:
            selector.register(peer.reader.socket, selectors.EVENT_READ, peer)
        while not self._closing and self._loss is None:
            for key, _ in selector.select(_WATCH_S):
                self._read(key.data)
            self._check_clocks(time.monotonic())
        selector.close()

    def _read(self, peer: Peer) -> None:
        try:
            reports = peer.reader.take()
        except LinkLost:
            how = ending(peer.process)
            self._lose(EngineFault(f"rank {peer.rank} ended ({how}) while the engine was running"))
            return
        for report in reports:
            peer.heard_s = time.monotonic()
            if "fault" in report:
                text = report["text"]
                self._lose(error_of(report["fault"], text) or EngineFault(f"rank {peer.rank}: {text}"))
            elif "at" in report:
                self._values.put((peer.rank, report["at"], report["value"]))
            elif "moved" in report:
                done = None if report["done"] is None else tuple(report["done"])
                self.transfers.add_of(peer.rank, Moved(report["moved"], report["ok"], done))

    def _check_clocks(self, now_s: float) -> None:
        for peer in self._peers:
            if now_s - peer.heard_s > self._timeout_s:
                self._lose(EngineFault(f"rank {peer.rank} has given no sign of life for {self._timeout_s:g} s"))
        if self._num_in_flight and now_s - self._progress_s > self._timeout_s:
            self._lose(EngineFault(f"no step has ended for {self._timeout_s:g} s: the ranks wait for each other"))

    def _lose(self, error: Exception) -> None:
        if self._closing or self._loss is not None:
            return
        self._loss = error
        self._lost.set()
        self._values.put(None)
        if not self._noticed.wait(_NOTICE_S):
            self.on_loss(error)


def lead(
    config: Config,
    source: ModelSource,
    model_config: ModelConfig,
    hardware: Hardware,
    others: Callable[[], list[Peer]] | None,
) -> Leader:
    """Start the other ranks of this machine and meet all of them. others: waits for those of other machines.

    Raises what a rank failed with, and what `others` raises.
    """
    parallel = config.parallel
    try:
        opened = Opened(parallel.init_host or _LOOPBACK, parallel.init_port, parallel.tensor_size)
    except RuntimeError as error:
        raise FlagError("--dist-init-addr", f"port {parallel.init_port}: {str(error).splitlines()[0]}") from None
    setup = Setup(config, source, model_config, hardware, 0, opened.meeting)
    peers = [start_rank(setup, rank) for rank in range(1, len(parallel.devices))]
    if others is not None:
        peers += [set_up(setup, peer) for peer in others()]
    leader = Leader(peers, parallel.timeout_s)
    try:
        leader.join(opened, config.device)
    except BaseException:
        leader.close()
        raise
    return leader


def start_rank(setup: Setup, rank: int) -> Peer:
    """Another process of this machine. It ends with us, however we end."""
    orders, their_orders = socket.socketpair()
    reports, their_reports = socket.socketpair()
    numbers = (their_orders.fileno(), their_reports.fileno())
    process = start_module("tokenspeed.engine.follower", numbers)
    their_orders.close()
    their_reports.close()
    timeout_s = setup.config.parallel.timeout_s
    first_word_s = time.monotonic() + max(0.0, START_LIMIT_S - timeout_s)
    return set_up(setup, Peer(rank, Orders(orders, timeout_s), ReportReader(reports), process, first_word_s))


def set_up(setup: Setup, peer: Peer) -> Peer:
    """Tell a rank what to serve."""
    peer.orders.send(Kind.SETUP, replace(setup, rank=peer.rank, config=config_of_rank(setup.config, peer.rank)))
    return peer


def config_of_rank(config: Config, rank: int) -> Config:
    """The same engine on another device, with no ports and no words of its own. A rank of another machine knows its
    device itself."""
    here = config.parallel.devices
    device = here[rank] if rank < len(here) else config.device.device
    operations = replace(config.operations, metrics_port=None, control_port=None)
    log = replace(config.log, log_level="warning" if config.log.log_level == "info" else config.log.log_level)
    return replace(config, device=replace(config.device, device=device), operations=operations, log=log)


def _hear_the_end(reader: ReportReader, deadline_s: float) -> None:
    """Wait for the end of a rank of another machine: ours would cut it short."""
    while time.monotonic() < deadline_s:
        try:
            reader.take()
        except LinkLost:
            return
        time.sleep(_POLL_S)


def _nothing(_error: Exception) -> None:
    return
