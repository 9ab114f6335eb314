# SPDX-License-Identifier: MIT
"""The engine's end of the ZMQ lane: one `EngineLane` a rank.

It dials the gateway's handshake, registers, then receives requests (DEALER) and sends results (PUSH). `poll` and
`close` belong to the thread that admits work, `send` and `reply` to the thread that publishes; those may be one
thread. It never answers a request by itself, never retries a send, and knows nothing of tensors.
When the gateway goes away, `poll` raises `LaneLost`: whatever was in flight has no reader any more; the engine
aborts it and may `connect` again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter

import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenspeed.config.curve import EngineCurve
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.curve import secure_engine
from tokenspeed.rpc.lane.sockets import descriptor, readable
from tokenspeed.rpc.lane.unread import unread
from tokenspeed.rpc.lane.wire import AbortRequests, AddRequest, ControlCall, EngineMessage, ReadyResponse, UnreadCall

__all__ = ["AbortRequests", "AddRequest", "ControlCall", "EngineLane", "LaneLost", "LaneTimeout", "ReadyResponse"]

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 30.0
_CLOSE_LINGER_MS = 1000
_REDIAL_PAUSE_S = 0.5


class LaneTimeout(TimeoutError):
    """The gateway did not answer the handshake in time."""


class LaneLost(ConnectionError):
    """The gateway's socket disconnected after registration."""


class EngineLane:
    """One rank's connection to a gateway.

    `handshake_address` is `tcp://host:port`; `engine_index` is the rank's number on this lane (0..65535);
    `engine_count` is how many ranks dial in all, told by every rank. `curve`: None for a lane without encryption.
    """

    def __init__(
        self,
        handshake_address: str,
        engine_index: int,
        ready: ReadyResponse,
        engine_count: int = 1,
        curve: EngineCurve | None = None,
    ) -> None:
        self.handshake_address = handshake_address
        self.engine_index = engine_index
        self.ready = ready
        self.dropped: Counter[str] = Counter()
        """Frames that were received and not understood, or that could not be sent, by cause."""
        self._hello = wire.Hello(engine_count=engine_count)
        self._handshake: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._reported_s = 0.0
        self._identity = wire.identity_of(engine_index)
        self._curve = curve
        self._context = zmq.Context()
        self._input: zmq.Socket[bytes] | None = None
        self._output: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def connect(self, timeout_s: float) -> None:
        """Dial and register. Raises `LaneTimeout` when the gateway does not answer within `timeout_s`; a further call
        goes on with the same dialling, so a loop of short calls is as good as a long one."""
        self._close_data_sockets(linger_ms=0)
        init = self._shake_hands(timeout_s)
        self._input = self._socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, self._identity)
        self._input.setsockopt(zmq.RCVHWM, 0)
        # The gateway has bound what it names: an address where nobody listens is one that it has given up meanwhile.
        self._monitor = self._input.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._input.connect(init.addresses.inputs[0])
        self._output = self._socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.connect(init.addresses.outputs[0])
        self._input.send(wire.encode(self.ready))

    def poll(self, timeout_s: float) -> list[EngineMessage]:
        """Everything that has arrived, in order; waits up to `timeout_s` (0: not at all) for the first message.

        Of messages that cannot be read, which are warned of and counted, comes what their senders can be told, if
        anything. Raises `LaneLost` once the gateway's socket is gone, after everything that arrived before has been
        returned.
        """
        messages: list[EngineMessage] = []
        for frames in self.receive(timeout_s):
            try:
                messages.append(wire.decode_engine_message(frames))
            except wire.WireError as error:
                self.dropped["bad_request"] += 1
                logger.warning("dropped a message that cannot be read: %s", error)
                answerable = unread(frames, error)
                if answerable is not None:
                    messages.append(answerable)
        return messages

    def receive(self, timeout_s: float = 0.0) -> list[list[bytes]]:
        """As `poll`, the frames of each message unread."""
        socket, monitor = self._connected()
        messages: list[list[bytes]] = []
        if timeout_s > 0 and not readable(socket):
            _wait(socket, monitor, timeout_s)
        while readable(socket):
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        if not messages and readable(monitor):
            recv_monitor_message(monitor, zmq.NOBLOCK)
            raise LaneLost(f"the gateway at {self.handshake_address} disconnected")
        return messages

    def send(self, batch: wire.BatchTokenIDOutSlim) -> None:
        """Send the results of a step. A batch without rows is a sign of life."""
        self._push(wire.encode(batch), "output_not_sent")

    def push(self, payload: bytes) -> None:
        """Send a result frame that somebody else has encoded."""
        self._push(payload, "output_not_sent")

    def descriptors(self) -> list[int]:
        """What an event loop watches: after each signal, `receive` is to be called until it gives nothing."""
        return [descriptor(socket) for socket in self._connected()]

    def reply(self, call: ControlCall | UnreadCall, success: bool, message: str) -> None:
        """Answer a control call; one reply a call and rank."""
        reply = wire.ControlReplySlim(call.call_id, success, message, self.engine_index)
        self._push(wire.encode(reply), "reply_not_sent")

    def close(self) -> None:
        """Tell the gateway that this engine is gone, and close. May be called twice."""
        if self._output is not None:
            self._push(wire.ENGINE_CORE_DEAD, "dead_not_sent")
        self._close_handshake(linger_ms=0)
        self._close_data_sockets(linger_ms=_CLOSE_LINGER_MS)
        if not self._context.closed:
            self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        secure_engine(socket, self._curve)
        return socket

    def _push(self, payload: bytes, cause: str) -> None:
        if self._output is None:
            raise LaneLost("the lane is not connected")
        try:
            self._output.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            # No peer: the gateway is gone and `poll` says so; there is nobody left to read this.
            self.dropped[cause] += 1

    def _connected(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        if self._input is None or self._monitor is None:
            raise LaneLost("the lane is not connected")
        return self._input, self._monitor

    def _shake_hands(self, timeout_s: float) -> wire.Init:
        """Say hello and wait for INIT. After a timeout the next call goes on waiting for the same answer."""
        deadline = time.monotonic() + timeout_s
        if self._handshake is None:
            self._handshake = self._dial()
        while True:
            socket, monitor = self._handshake
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise LaneTimeout(f"no gateway answered the handshake at {self.handshake_address}")
            self._report_waiting()
            init = self._receive_init(socket, monitor, min(remaining_s, _REPORT_INTERVAL_S))
            if init is not None:
                socket.send(wire.encode(wire.Ready()))
                self._close_handshake(linger_ms=_CLOSE_LINGER_MS)
                return init

    def _dial(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(self.handshake_address)
        # A gateway that does not know our key may have refused us by now; the monitor says so.
        with contextlib.suppress(zmq.Again):
            socket.send(wire.encode(self._hello), zmq.NOBLOCK)
        self._reported_s = time.monotonic()
        return socket, monitor

    def _receive_init(
        self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], timeout_s: float
    ) -> wire.Init | None:
        if not _wait(socket, monitor, timeout_s):
            return None
        if not readable(socket):
            # Whoever heard the hello is gone, or does not know our key. The next one has to hear it, once: what this
            # socket still holds would be said beside a second one.
            self._close_handshake(linger_ms=0)
            time.sleep(min(timeout_s, _REDIAL_PAUSE_S))
            self._handshake = self._dial()
            return None
        try:
            return wire.decode_init(socket.recv_multipart()[-1])
        except wire.WireError as error:
            self.dropped["bad_init"] += 1
            logger.warning("dropped a handshake message that cannot be read: %s", error)
            return None

    def _report_waiting(self) -> None:
        if time.monotonic() - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = time.monotonic()
            logger.info("waiting for a gateway at %s", self.handshake_address)

    def _close_handshake(self, linger_ms: int) -> None:
        if self._handshake is not None:
            socket, monitor = self._handshake
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=linger_ms)
            self._handshake = None

    def _close_data_sockets(self, linger_ms: int) -> None:
        if self._input is not None:
            self._input.disable_monitor()
        for socket in (self._monitor, self._input, self._output):
            if socket is not None:
                socket.close(linger=linger_ms)
        self._input = self._output = self._monitor = None


def _wait(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], timeout_s: float) -> bool:
    """Wait until one of the two can be read; False when neither can after `timeout_s`."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    return bool(poller.poll(math.ceil(timeout_s * 1000)))
