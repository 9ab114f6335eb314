# SPDX-License-Identifier: MIT
"""One worker between its engine and several gateways: an engine dials once, and each gateway has a lane of its own.

A lane has one binder, so a process in front binds the worker's lane and dials each gateway's private one, where it
stands for the engine: requests pass as the bytes that they are, a step's results are cut by gateway. Lives on the
asyncio loop's thread. It keeps no request and retries none: when the engine is lost, every gateway's lane is lost;
when a gateway is lost, its requests are aborted on the engine, and the next gateway there is dialled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.base import LaneOptions, LaneState
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneLost, LaneTimeout
from tokenspeed.rpc.lane.gateway_end import GatewayLane
from tokenspeed.rpc.lane.rank import Rank
from tokenspeed.rpc.lane.unread import unread
from tokenspeed.rpc.lane.wire import UnreadCall, UnreadRequest

logger = logging.getLogger(__name__)

_DIAL_S = 0.001
_DIAL_EVERY_S = 0.05


class Relay:
    """`url`: the worker. `homes`: the handshake address of each gateway's private lane for it."""

    def __init__(self, url: str, options: LaneOptions, homes: Sequence[str]) -> None:
        self._lane = _EngineSide(url, options, self._changed)
        self._homes = homes
        self._ports: list[_Port] = []

    @property
    def num_in_flight(self) -> int:
        """Requests of all gateways that the engine has not finished."""
        return self._lane.num_in_flight

    def leave(self) -> None:
        """The gateways give the worker up, each when its requests have ended: one that is gone is not dialled again."""
        self._lane.leaving = True

    def open(self) -> None:
        """Bind the worker's lane. Raises `AddressError` or `zmq.ZMQError`."""
        self._lane.open()

    def close(self) -> None:
        """Close every socket."""
        self._close_ports()
        self._lane.close()

    def _changed(self, state: LaneState, reason: str) -> None:
        logger.info("worker %s is %s: %s", self._lane.url, state.value, reason)
        self._close_ports()
        if state is LaneState.READY:
            ranks = list(self._lane.ranks.values())
            self._ports = [_Port(self._lane, rank, home, len(ranks)) for home in self._homes for rank in ranks]

    def _close_ports(self) -> None:
        ports, self._ports = self._ports, []
        for port in ports:
            port.close()


class _EngineSide(GatewayLane):
    """The worker's own lane. The sink of a request is the `_Port` that it came through."""

    def __init__(self, url: str, options: LaneOptions, on_state: Callable[[LaneState, str], None]) -> None:
        super().__init__(url, options, on_state)
        self.leaving = False
        self._num_relayed = 0
        self._relayed: dict[int, tuple[_Port, int | str]] = {}
        """Calls on their way to a rank: whose they are, and the caller's number."""

    def add(self, port: _Port, frames: list[bytes]) -> None:
        """Pass a request on to the port's rank."""
        rid = wire.decode_request_id(frames[1])
        if rid in self._sinks:
            port.refuse(rid, 400, f"request id {rid!r} is in flight already")
        elif self.state is LaneState.READY and self._send(port.rank, frames):
            self._sinks[rid] = (port, port.rank)
            port.rank.begin(time.monotonic(), 0)

    def relay_control(self, port: _Port, call: wire.ControlCall) -> None:
        """Pass a call on to the port's rank; its answer goes back to the port under the caller's number."""
        self._num_relayed += 1
        self._relayed[self._num_relayed] = (port, call.call_id)
        self._send(port.rank, wire.encode_control(wire.ControlCall(self._num_relayed, call.method, call.args)))

    def abort_all(self, port: _Port) -> None:
        """The gateway behind the port is gone."""
        self.abort([rid for rid, (sink, _) in self._sinks.items() if sink is port])
        self._relayed = {number: entry for number, entry in self._relayed.items() if entry[0] is not port}

    def abort_of(self, port: _Port, request_ids: Sequence[str]) -> None:
        """Abort those that are the port's own."""
        self.abort(self._own(port, request_ids))

    def end_of(self, port: _Port, request_ids: Sequence[str]) -> None:
        """The same where their text is complete."""
        self.end(self._own(port, request_ids))

    def _own(self, port: _Port, request_ids: Sequence[str]) -> list[str]:
        return [rid for rid in request_ids if rid in self._sinks and self._sinks[rid][0] is port]

    def _on_batch(self, batch: wire.BatchTokenIDOutSlim, payload: bytes) -> None:
        rows: dict[_Port, list[int]] = {}
        for row, rid in enumerate(batch.rids):
            entry = self._sinks.get(rid)
            if entry is None:
                self.dropped["unknown_request"] += 1
                continue
            port = entry[0]
            assert isinstance(port, _Port)  # nothing else is put there
            rows.setdefault(port, []).append(row)
            if batch.finished_reasons[row]:
                self._forget(rid)
        for port, own in rows.items():
            port.send(payload if len(own) == len(batch.rids) else wire.encode(batch.of_rows(own)))
        # Whoever waits for a first token has to see that the engine lives.
        waiting = {sink for sink, rank in self._sinks.values() if rank.index == batch.engine_index}
        sign: bytes | None = None
        for port in waiting.difference(rows):
            sign = sign or wire.encode(batch.of_rows([]))
            assert isinstance(port, _Port)
            port.send(sign)

    def _on_reply(self, reply: wire.ControlReplySlim) -> None:
        entry = self._relayed.pop(int(reply.call_id), None)
        if entry is not None:
            port, call_id = entry
            port.send(wire.encode(wire.ControlReplySlim(call_id, reply.success, reply.message, reply.engine_index)))


class _Port:
    """One rank as one gateway sees it: the engine's end of that gateway's private lane."""

    def __init__(self, engine: _EngineSide, rank: Rank, home: str, num_ranks: int) -> None:
        assert rank.response is not None  # the lane is ready
        self.rank = rank
        self._engine = engine
        self._lane = EngineLane(home, rank.index, rank.response, num_ranks)
        self._loop = asyncio.get_running_loop()
        self._connected = False
        self._watched: list[int] = []
        self._timer = self._loop.call_soon(self._dial)

    def push(self, batch: wire.BatchTokenIDOutSlim, row: int) -> None:
        """A sink's part; results go by whole batches instead."""

    def fail(self, reason: str) -> None:
        """A sink's part; the loss of the engine closes the port."""

    def send(self, payload: bytes) -> None:
        """A result frame for the gateway."""
        if self._connected:
            self._lane.push(payload)

    def refuse(self, rid: str, status: int, message: str) -> None:
        """End a request that the engine never saw."""
        self.send(wire.encode(wire.refusal(rid, status, message, self.rank.index)))

    def close(self) -> None:
        """Tell the gateway that the engine is gone."""
        self._timer.cancel()
        self._unwatch()
        self._lane.close()

    def _dial(self) -> None:
        try:
            self._lane.connect(_DIAL_S)
        except LaneTimeout:
            self._timer = self._loop.call_later(_DIAL_EVERY_S, self._dial)
            return
        self._connected = True
        self._watched = self._lane.descriptors()
        for descriptor in self._watched:
            self._loop.add_reader(descriptor, self._read)
        self._timer = self._loop.call_soon(self._read)

    def _read(self) -> None:
        try:
            while messages := self._lane.receive():
                for frames in messages:
                    self._pass_on(frames)
        except LaneLost:
            self._unwatch()
            self._engine.abort_all(self)
            if not self._engine.leaving:
                logger.warning("a gateway in front of worker %s is gone", self._engine.url)
                self._timer = self._loop.call_soon(self._dial)

    def _pass_on(self, frames: list[bytes]) -> None:
        try:
            if frames[0] == wire.FRAME_ADD and len(frames) > 1:
                self._engine.add(self, frames)
                return
            message = wire.decode_engine_message(frames)
        except wire.WireError as error:
            self._engine.dropped["unreadable"] += 1
            logger.warning("dropped a message that cannot be read: %s", error)
            self._tell(unread(frames, error))
            return
        if isinstance(message, wire.AbortRequests):
            self._engine.abort_of(self, message.request_ids)
        elif isinstance(message, wire.EndRequests):
            self._engine.end_of(self, message.request_ids)
        elif isinstance(message, wire.ControlCall):
            self._engine.relay_control(self, message)

    def _tell(self, message: UnreadRequest | UnreadCall | None) -> None:
        """The sender of what cannot be read, if it waits for it."""
        if isinstance(message, UnreadRequest):
            self.refuse(message.rid, message.status, f"{message.code}: {message.message}")
        elif isinstance(message, UnreadCall):
            self.send(wire.encode(wire.ControlReplySlim(message.call_id, False, message.message, self.rank.index)))

    def _unwatch(self) -> None:
        self._connected = False
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        self._watched = []
