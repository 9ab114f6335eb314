# SPDX-License-Identifier: MIT
"""The two connections between the first rank and each other one: orders go down one, signs of life up the other.

Orders are frames in the order in which they were sent; whoever sends one trusts whoever gave it the address, as torch's
collectives do. Reports are lines of JSON. The end of either connection is the end of the process behind it, which the
kernel tells at once, whatever that process was doing.
"""

from __future__ import annotations

import enum
import json
import pickle
import socket
import struct
import threading
from typing import Any

_HEADER = struct.Struct("<QBI")


class LinkLost(ConnectionError):
    """The process at the other end is gone."""


class Kind(enum.IntEnum):
    """What an order is."""

    SETUP = 0
    """What to serve, and where the ranks meet."""
    ANSWER = 1
    """What all ranks use where each had a number or an opinion of its own."""
    OPERATION = 2
    TURN = 3
    STOP = 4


class Orders:
    """Either end of the connection from the first rank to another. One thread at each end uses it."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        """timeout_s: that an order may wait for the other end to take it; None at the end that receives."""
        self._socket = connection
        self._socket.settimeout(timeout_s)

    def send(self, kind: Kind, content: Any, digest: int = 0) -> None:
        """content: None, or anything that pickle takes. Raises LinkLost."""
        payload = b"" if content is None else pickle.dumps(content, protocol=5)
        try:
            self._socket.sendall(_HEADER.pack(len(payload), kind, digest) + payload)
        except OSError as error:
            raise LinkLost(f"an order was not taken: {error}") from None

    def receive(self) -> tuple[Kind, Any, int]:
        """The next order: (kind, content, digest). Waits for it. Raises LinkLost."""
        length, kind, digest = _HEADER.unpack(self._exactly(_HEADER.size))
        content = pickle.loads(self._exactly(length)) if length else None
        return Kind(kind), content, digest

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError as error:
                raise LinkLost(str(error)) from None
            if not part:
                raise LinkLost("the first rank is gone")
            parts += part
        return bytes(parts)


class Reports:
    """The other rank's end of what it reports. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, **report: Any) -> None:
        """Values as JSON has them. Nobody there to read is nobody's loss: `wait_for_the_end` tells."""
        line = json.dumps(report).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(line)
            except OSError:
                return

    def has_ended(self, timeout_s: float) -> bool:
        """Wait so long for the first rank's end; whether it came. Nothing else is ever sent down here."""
        self._socket.settimeout(timeout_s)
        try:
            return not self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True


class ReportReader:
    """The first rank's end of what another reports; it is read when a selector says so."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        self._partial = b""

    def take(self) -> list[dict[str, Any]]:
        """Reports that have arrived whole. Raises LinkLost at the end."""
        try:
            received = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(str(error)) from None
        if not received:
            raise LinkLost("it ended")
        *lines, self._partial = (self._partial + received).split(b"\n")
        return [json.loads(line) for line in lines]
