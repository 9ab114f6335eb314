# SPDX-License-Identifier: MIT
"""What both ends ask of a ZMQ socket, past the wrappers of the library, which cost more than what they wrap."""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.backend import Socket as _Raw

_POLLIN, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_send, _get = _Raw.send, _Raw.get


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking also re-arms the edge of the socket's descriptor."""
    return bool(int(_get(socket, _EVENTS)) & _POLLIN)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """The file descriptor that becomes readable when the socket's events may have changed."""
    return int(socket.get(zmq.FD))


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send the frames of one message without waiting. Raises `zmq.Again` when the queue is full."""
    for frame in frames[:-1]:
        _send(socket, frame, _MORE)
    _send(socket, frames[-1], _NOBLOCK)
