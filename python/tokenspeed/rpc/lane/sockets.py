# SPDX-License-Identifier: MIT
"""Two questions that both ends ask a ZMQ socket."""

from __future__ import annotations

import zmq


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking also re-arms the edge of the socket's descriptor."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """The file descriptor that becomes readable when the socket's events may have changed."""
    return int(socket.get(zmq.FD))
