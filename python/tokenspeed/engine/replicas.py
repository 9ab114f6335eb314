# SPDX-License-Identifier: MIT
"""The engine as `Engine` runs it with `--data-parallel-size`: replicas in processes of their own, which share nothing.

A request goes to the replica that it names, else to the one with the least to do; a prompt's choices stay together. A
replica that dies ends its own requests, once each, with EngineDeadError; the others serve on, and `Revival` starts it
again. Each has two threads here: one writes what its frontend is given, one hands on what it says.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch

from tokenspeed.config.resolve import Config
from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.core import facts_of
from tokenspeed.engine.errors import EngineDeadError, EngineFault, OperationError, error_of
from tokenspeed.engine.kv_feed import KvLog
from tokenspeed.engine.local_frontend import LocalFrontend, Mailbox
from tokenspeed.engine.messages import Add, Command, LoadNumbers, StepOutput
from tokenspeed.engine.ports import EnginePorts
from tokenspeed.engine.processes import end_process, ending, start_module
from tokenspeed.engine.replica_link import Call, Failed, KvChanges, Ready, ReplicaState, Returned, Setup
from tokenspeed.engine.replica_operations import SharedOperations
from tokenspeed.engine.revival import Revival
from tokenspeed_cc import AllBlocksCleared

logger = logging.getLogger("tokenspeed.engine")

_END_S = 30.0
_CALL_S = 60.0
_POLL_S = 0.05


class Replicas:
    """Serves from construction to `stop`. flags: the engine's, as parsed; config: what they come to. Raises what a
    replica's start raised."""

    def __init__(self, flags: Mapping[str, Any], config: Config) -> None:
        parallel = config.parallel
        self.kv_log = KvLog(config.memory.block_size)
        self._revival = Revival(flags["replica_restarts"], self._hindrance, self._start, self._join)
        self._flags = flags
        self._replicas = [self._start(rank) for rank in range(parallel.data_size)]
        self.frontend = SharedFrontend([replica.frontend for replica in self._replicas])
        device = torch.device(config.device.device)
        self.operations = SharedOperations(self._replicas, parallel.tensor_size, device)
        try:
            _wait_ready(self._replicas)
            first = self._replicas[0].state
            self._started_with = (first.weight_version, first.model_path)
            for replica in self._replicas:
                self._revival.watch(replica)
            facts = facts_of(config, self.num_blocks + 1, 0)
            self.ports = EnginePorts(config.operations, self.operations, self.operations, facts)
        except BaseException:
            self._end()
            raise

    def ask_to_stop(self) -> None:
        """They will end, each after its steps in flight."""
        self._revival.stop()
        for replica in self._replicas:
            replica.begin_to_end()

    def stop(self) -> None:
        """End all replicas; whoever waits gets EngineDeadError. May be called twice."""
        self.ports.close()
        self._end()

    @property
    def is_alive(self) -> bool:
        """Whether any of them serves, or will again."""
        return any(replica.is_alive for replica in self._replicas) or self._revival.is_due

    @property
    def num_blocks(self) -> int:
        """Of one replica, where they differ the smallest."""
        return min(replica.num_blocks for replica in self._replicas)

    @property
    def late_compiles(self) -> int:
        return sum(replica.state.late_compiles for replica in self._replicas)

    def record_kv_events(self) -> None:
        self.kv_log.enable()
        self.operations.call("record_kv_events")

    def loads(self) -> list[LoadNumbers | None]:
        """By replica, as each told last; None of one that is gone."""
        return [replica.load if replica.is_alive else None for replica in self._replicas]

    def _start(self, rank: int) -> Replica:
        return Replica(Setup(self._flags, rank), self.kv_log)

    def _serving(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.is_alive]

    def _hindrance(self) -> str:
        """Why a replica that starts now would not be like the others."""
        states = [replica.state for replica in self._serving()]
        if any((state.weight_version, state.model_path) != self._started_with for state in states):
            return "the others have other weights than those that the engine was started with"
        return "the others sleep, or collect new weights" if any(s.asleep or s.collects for s in states) else ""

    def _join(self, replica: Replica) -> str:
        """Let a replica that was started again serve in place of the one that died; why not, if it cannot."""
        rank, operations = replica.data_rank, self.operations
        if self.kv_log.enabled:
            replica.call("record_kv_events", ()).result(_CALL_S)
        with operations.changing_weights:
            if hindrance := self._hindrance():
                return hindrance
            if any(other.state.is_paused for other in self._serving()):
                replica.call("pause", ("keep", _CALL_S)).result(_CALL_S)
            lost, self._replicas[rank] = self._replicas[rank], replica
            self.frontend.replace(rank, replica.frontend)
        lost.end(0.0)
        return ""

    def _end(self) -> None:
        self.ask_to_stop()
        deadline_s = time.monotonic() + _END_S
        for replica in self._replicas:
            replica.end(deadline_s - time.monotonic())


class Replica:
    """One of them, from here."""

    def __init__(self, setup: Setup, kv_log: KvLog) -> None:
        self.data_rank = setup.data_rank
        self.num_blocks = 0
        self.load = LoadNumbers(0, 0, 0, 1)
        self.state = ReplicaState("", "", False, False, (), 0)
        self.ready: Future[None] = Future()
        self._on_loss: Callable[[], None] | None = None
        self._lost = False
        self._lock = threading.Lock()
        self._kv_log = kv_log
        self._ending = False
        self._fault = ""
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.frontend = _Frontend(self._outgoing)
        ours, theirs = socket.socketpair()
        self.process = start_module("tokenspeed.engine.replica", [theirs.fileno()], str(setup.data_rank))
        theirs.close()
        self._link: Connection[Any, Any] = Connection(ours.detach())
        self._outgoing.put(setup)
        name = f"replica-{self.data_rank}"
        self._writer = threading.Thread(target=self._write, name=f"{name}-writes", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{name}-reads", daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        return self.frontend.is_open

    def call(self, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """The result of a method of its `Operations`; EngineDeadError when it dies meanwhile."""
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = future
        if self.is_alive:
            self._outgoing.put(Call(number, name, arguments))
        else:
            self._fail_calls()
        return future

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Call `on_loss` once when it dies without being asked to end, or now if it has; not on the loop's thread."""
        with self._lock:
            self._on_loss, lost = on_loss, self._lost
        if lost and not self._ending:
            on_loss()

    def begin_to_end(self) -> None:
        self._ending = True
        self._outgoing.put(None)

    def end(self, limit_s: float) -> None:
        """Wait for its end, and make it come. May be called twice."""
        end_process(self.process, limit_s)
        self._reader.join()
        self._writer.join()
        self._link.close()

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._link.send(message)
            self._link.send(None)
        except OSError:
            return  # it is gone, as the reader sees

    def _read(self) -> None:
        try:
            while True:
                self._take(self._link.recv())
        except (EOFError, OSError):
            self._lose()

    def _take(self, message: Any) -> None:
        if isinstance(message, StepOutput):
            self.load = message.load
            self.frontend.publish(message)
        elif isinstance(message, Returned):
            self.state = message.state
            _settle(self._calls.pop(message.number), message)
        elif isinstance(message, KvChanges):
            self._kv_log.add(message.timestamp_s, message.changes, self.data_rank)
        elif isinstance(message, ReplicaState):
            self.state = message
        elif isinstance(message, Ready):
            self.num_blocks, self.state = message.num_blocks, message.state
            self.load = LoadNumbers(0, 0, 0, message.num_blocks)
            self.ready.set_result(None)
        elif isinstance(message, Failed):
            self._fault = message.text
            if not self.ready.done():
                text = f"data-parallel rank {self.data_rank}: {message.text}"
                self.ready.set_exception(error_of(message.kind, message.text) or EngineFault(text))

    def _lose(self) -> None:
        why = self._fault or f"ended ({ending(self.process)})"
        loss = EngineFault(f"data-parallel rank {self.data_rank} {'died: ' if self._fault else ''}{why}")
        if not self._ending:
            logger.error("%s; its requests end", loss)
        self.frontend.fail(None if self._ending else loss)
        self._outgoing.put(None)
        self._fail_calls()
        if not self.ready.done():
            self.ready.set_exception(loss)
        if self._kv_log.enabled:
            self._kv_log.add(time.time(), [AllBlocksCleared()], self.data_rank)
        with self._lock:
            self._lost, told = True, self._on_loss
        if told is not None and not self._ending:
            told()

    def _fail_calls(self) -> None:
        while self._calls:
            try:
                _, future = self._calls.popitem()
            except KeyError:
                return  # another thread was faster
            future.set_exception(EngineDeadError(f"data-parallel rank {self.data_rank} is gone"))


class _Frontend(LocalFrontend):
    """Of a replica: what its loop is handed goes down the link."""

    def __init__(self, outgoing: queue.SimpleQueue[Any]) -> None:
        super().__init__()
        self._outgoing = outgoing

    def deliver(self, commands: Sequence[Command]) -> None:
        self._outgoing.put(commands)


class SharedFrontend:
    """`RequestFrontend` of several replicas, by number."""

    def __init__(self, frontends: Sequence[LocalFrontend]) -> None:
        self._frontends = list(frontends)
        self._lock = threading.Lock()

    @property
    def replicas(self) -> list[LocalFrontend]:
        return [frontend for frontend in self._frontends if frontend.is_open]

    def replace(self, data_rank: int, frontend: LocalFrontend) -> None:
        """A replica that died serves again."""
        with self._lock:
            self._frontends[data_rank] = frontend

    def place(self, data_rank: int | None) -> int:
        return self._place(data_rank, [0] * len(self._frontends))

    def submit(self, requests: Sequence[Add], mailbox: Mailbox) -> None:
        """As `LocalFrontend.submit`. A replica that dies just then is no reason to fail what another can serve."""
        waiting, sent = list(requests), list[str]()
        with self._lock:
            for request in requests:
                if any(frontend.knows(request.rid) for frontend in self._frontends):
                    raise RequestError("rid", "duplicate_request_id", f"request id {request.rid!r} is in use")
            try:
                while waiting:
                    waiting = self._submit(waiting, mailbox, sent)
            except BaseException:
                self.abandon(sent)
                raise

    def abort(self, rids: Sequence[str]) -> None:
        for frontend in self._frontends:
            frontend.abort([rid for rid in rids if frontend.knows(rid)])

    def end(self, rids: Sequence[str]) -> None:
        for frontend in self._frontends:
            frontend.end([rid for rid in rids if frontend.knows(rid)])

    def abandon(self, rids: Sequence[str]) -> None:
        for frontend in self._frontends:
            frontend.abandon([rid for rid in rids if frontend.knows(rid)])

    def abort_where(self, chosen: Callable[[str], bool]) -> int:
        return sum(frontend.abort_where(chosen) for frontend in self._frontends)

    def _submit(self, requests: Sequence[Add], mailbox: Mailbox, sent: list[str]) -> list[Add]:
        """What has still to find a replica. `sent`: the ids of what has found one."""
        left = []
        for number, group in self._placed(requests).items():
            try:
                self._frontends[number].submit(group, mailbox)
                sent += [request.rid for request in group]
            except EngineDeadError:
                if any(request.data_rank is not None for request in group):
                    raise
                left += group
        return left

    def _placed(self, requests: Sequence[Add]) -> dict[int, list[Add]]:
        added = [0] * len(self._frontends)
        placed: dict[int, list[Add]] = {}
        before, number = None, 0
        for request in requests:
            together = before is not None and before.token_ids is request.token_ids
            if before is None or not together or before.data_rank != request.data_rank:
                number = self._place(request.data_rank, added)
            before = request
            added[number] += 1
            placed.setdefault(number, []).append(request)
        return placed

    def _place(self, data_rank: int | None, added: Sequence[int]) -> int:
        """added: what is about to be submitted to each."""
        if data_rank is not None:
            if not self._frontends[data_rank].is_open:
                raise EngineDeadError(f"data-parallel rank {data_rank} is gone")
            return data_rank
        numbers = [number for number, frontend in enumerate(self._frontends) if frontend.is_open]
        if not numbers:
            raise EngineDeadError("the engine has stopped")

        def load(number: int) -> tuple[int, int]:
            frontend = self._frontends[number]
            return frontend.num_in_flight + added[number], frontend.num_submitted + added[number]

        return min(numbers, key=load)


def _settle(future: Future[Any], returned: Returned) -> None:
    if returned.error is None:
        future.set_result(returned.value)
        return
    kind, text, status = returned.error
    known: dict[str, Exception] = {
        "OperationError": OperationError(status, text),
        "EngineDeadError": EngineDeadError(text),
        "TimeoutError": TimeoutError(text),
    }
    future.set_exception(known.get(kind) or EngineFault(f"{kind}: {text}"))


def _wait_ready(replicas: Sequence[Replica]) -> None:
    """The first failure of any is all's."""
    while not all(replica.ready.done() for replica in replicas):
        for replica in replicas:
            if replica.ready.done():
                replica.ready.result()
        time.sleep(_POLL_S)
    for replica in replicas:
        replica.ready.result()
