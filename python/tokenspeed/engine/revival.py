# SPDX-License-Identifier: MIT
"""Starts replicas again that died, beside those that serve: after pauses that double, so often and no more.

A thread for each that is down, from its loss until it serves again, is given up, or everything stops. A replica comes
back with the weights that the engine was started with; where the others have been given others since, it stays away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from tokenspeed.config.flags import FlagError
from tokenspeed.config.restarts import Restarts
from tokenspeed.engine.errors import START_ERRORS, EngineDeadError, EngineFault, OperationError

logger = logging.getLogger("tokenspeed.engine")


class Revivable(Protocol):
    """A replica, as much as is needed of it. on_loss is called once, as soon as it is set if it has died by then."""

    data_rank: int
    ready: Future[None]

    def watch(self, on_loss: Callable[[], None]) -> None: ...
    def begin_to_end(self) -> None: ...
    def end(self, limit_s: float) -> None: ...


R = TypeVar("R", bound=Revivable)


class Revival(Generic[R]):
    """hindrance: why none can be started now, or "". start: of the replica of a rank. join: lets one that is ready
    serve; also says why it cannot. Raises FlagError for a negative limit."""

    def __init__(
        self, limit: int, hindrance: Callable[[], str], start: Callable[[int], R], join: Callable[[R], str]
    ) -> None:
        if limit < 0:
            raise FlagError("--replica-restarts", f"must not be negative, got {limit}")
        self._limit = limit
        self._hindrance = hindrance
        self._start = start
        self._join = join
        self._restarts: dict[int, Restarts] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: dict[int, threading.Thread] = {}
        self._starting: dict[int, R] = {}

    @property
    def is_due(self) -> bool:
        """Whether a replica that is down may serve again."""
        return bool(self._threads) and not self._stopped.is_set()

    def watch(self, replica: R) -> None:
        """Start it again when it is lost."""
        replica.watch(lambda: self._lost(replica.data_rank))

    def stop(self) -> None:
        """Start nothing any more, and end what was starting. May be called twice."""
        with self._lock:
            self._stopped.set()
            starting, threads = list(self._starting.values()), list(self._threads.values())
        for replica in starting:
            replica.begin_to_end()
            replica.end(0.0)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _lost(self, rank: int) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            name = f"replica-{rank}-revival"
            self._threads[rank] = threading.Thread(target=self._revive, args=(rank,), name=name, daemon=True)
            self._threads[rank].start()

    def _revive(self, rank: int) -> None:
        restarts = self._restarts.setdefault(rank, Restarts(self._limit))
        try:
            while (pause_s := restarts.pause_s(time.monotonic())) is not None:
                logger.warning("data-parallel rank %d is started again in %g s", rank, pause_s)
                if self._stopped.wait(pause_s) or self._serves(rank):
                    return
            if self._limit:
                logger.error("data-parallel rank %d is not started again (--replica-restarts)", rank)
        finally:
            with self._lock:
                if self._threads.get(rank) is threading.current_thread():
                    del self._threads[rank]

    def _serves(self, rank: int) -> bool:
        """Start one; whether it serves now, or nothing shall."""
        refused = self._hindrance()
        if not refused:
            with self._lock:
                if self._stopped.is_set():
                    return True
                replica = self._starting[rank] = self._start(rank)
            refused = self._joined(replica)
            with self._lock:
                del self._starting[rank]
            if not refused:
                logger.warning("data-parallel rank %d serves again", rank)
                self.watch(replica)
                return True
        if not self._stopped.is_set():
            logger.error("data-parallel rank %d does not serve again: %s", rank, refused)
        return False

    def _joined(self, replica: R) -> str:
        """Let it serve; why it cannot, and then it has ended."""
        try:
            replica.ready.result()
            refused = self._join(replica)
        except (EngineDeadError, EngineFault, OperationError, TimeoutError, *START_ERRORS) as error:
            refused = str(error) or type(error).__name__
        if refused:
            replica.begin_to_end()
            replica.end(0.0)
        return refused
