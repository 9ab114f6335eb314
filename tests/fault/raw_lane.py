# SPDX-License-Identifier: MIT
"""Both ends of a lane as bare sockets, which send whatever a test gives them."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from tests.support.processes import free_port

WAIT_MS = 60_000
ENGINE = b"\x00\x00"


class RawGateway:
    """The sockets that a gateway binds, for one engine."""

    def __init__(self) -> None:
        self.port, self._input_port, self._output_port = free_port(), free_port(), free_port()
        self._context = zmq.Context()
        self._handshake = self._bound(zmq.ROUTER, self.port)
        self._input = self._bound(zmq.ROUTER, self._input_port)
        self._output = self._bound(zmq.PULL, self._output_port)

    def accept(self) -> dict[str, Any]:
        """Shake hands with the engine that dials; its ready response."""
        assert self._handshake.poll(WAIT_MS), "no engine dialled"
        identity, _hello = self._handshake.recv_multipart()
        addresses = {
            "inputs": [f"tcp://127.0.0.1:{self._input_port}"],
            "outputs": [f"tcp://127.0.0.1:{self._output_port}"],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": None,
        }
        init = {"addresses": addresses, "parallel_config": {}}
        self._handshake.send_multipart([identity, msgspec.msgpack.encode(init)])
        assert self._input.poll(WAIT_MS), "the engine did not register"
        _identity, ready = self._input.recv_multipart()
        return dict(msgspec.msgpack.decode(ready))

    def send(self, *frames: bytes) -> None:
        self._input.send_multipart([ENGINE, *frames])

    def receive(self, limit_ms: int = WAIT_MS) -> bytes | None:
        """The next frame of results, None when none comes in time."""
        return self._output.recv() if self._output.poll(limit_ms) else None

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _bound(self, kind: int, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.bind(f"tcp://127.0.0.1:{port}")
        return socket


class RawEngine:
    """The sockets that an engine connects to the gateway whose handshake is at `port`."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._handshake = self._dealer(f"tcp://127.0.0.1:{port}")
        self._handshake.send(msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": True}))
        assert self._handshake.poll(WAIT_MS), "the gateway did not answer"
        init = msgspec.msgpack.decode(self._handshake.recv())
        self._handshake.send(msgspec.msgpack.encode({"status": "READY", "local": True, "headless": True}))
        self._input = self._dealer(init["addresses"]["inputs"][0])
        self._output = self._context.socket(zmq.PUSH)
        self._output.connect(init["addresses"]["outputs"][0])

    def register(self, ready: bytes) -> None:
        self._input.send(ready)

    def receive(self) -> list[bytes]:
        """The next request's frames."""
        assert self._input.poll(WAIT_MS), "no request came"
        return self._input.recv_multipart()

    def push(self, frame: bytes) -> None:
        self._output.send(frame)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, ENGINE)
        socket.connect(address)
        return socket
