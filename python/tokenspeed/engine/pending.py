# SPDX-License-Identifier: MIT
"""`Pending[T]`: a value that a device or a thread has not produced yet. Launch returns one and never waits."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> T_co:
        """The value; blocks until it is there. Raises what its computation raised."""


class Done(Generic[T]):
    """A value that is already there."""

    def __init__(self, value: T) -> None:
        self._value = value

    def ready(self) -> bool:
        return True

    def wait(self) -> T:
        return self._value


class OnThread(Generic[T]):
    """A value that another thread computes."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def wait(self) -> T:
        return self._future.result()
