# SPDX-License-Identifier: MIT
"""Calls from other threads that the loop runs between two turns: the only way in for operators' HTTP threads.

`call` belongs to any thread but the loop's and waits for the result; `run` belongs to the loop. After `close` every
call fails, so nobody waits for a loop that has ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tokenspeed.engine.errors import EngineDeadError

T = TypeVar("T")

CALL_LIMIT_S = 60.0
"""A turn is a step; a call that waits longer than this meets a loop that is stuck."""


class LoopCalls:
    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()

    def call(self, function: Callable[[], T]) -> T:
        """`function`'s result, from the loop's thread. Raises what it raises, EngineDeadError, TimeoutError."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine has stopped")
            self._waiting.put((function, future))
        return future.result(CALL_LIMIT_S)

    def run(self) -> None:
        """Run what waits, in order."""
        while not self._waiting.empty():
            function, future = self._waiting.get()
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  (the caller's, as if it had run the function itself)
                future.set_exception(error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        while not self._waiting.empty():
            self._waiting.get()[1].set_exception(EngineDeadError("the engine has stopped"))
