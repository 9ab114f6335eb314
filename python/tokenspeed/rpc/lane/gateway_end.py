# SPDX-License-Identifier: MIT
"""The gateway's end of the ZMQ lane: one `GatewayLane` a worker URL, living on the asyncio loop's thread.

It binds the handshake, the request and the result sockets, registers the ranks that dial, hands every result row to
the sink of its request, and turns the loss of any rank into one `fail` a request in flight; then it binds anew and
waits for all ranks to dial again. It never retries a request and never waits: every method returns at once.
Results are pushed into sinks (no queue and no task per request here), because one step of a full batch carries
hundreds of rows and a task switch for each would cost more than the row.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import Lane, LaneNotReady, LaneOptions, LaneState, RequestSink
from tokenspeed.rpc.lane.curve import ZAP_ADDRESS, judge, secure_gateway
from tokenspeed.rpc.lane.rank import Rank
from tokenspeed.rpc.lane.sockets import descriptor, readable, send

logger = logging.getLogger(__name__)

# An engine that stops sends its last results and ENGINE_CORE_DEAD on another connection than the one whose loss we
# see first; they get this long to arrive before requests in flight are failed.
_LAST_WORDS_S = 0.1
_REGISTERS_S = 2.0
"""Between an engine's READY and its registration."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.5, 30.0
_FRAMES_PER_TURN = 64
_HELD_MESSAGES = 8
"""A message that wakes the socket's thread costs more than one that goes with another. The first of a turn of the loop
goes at once; those behind it go by so many, and at the turn's end: none waits for long."""
_TCP_HEARTBEAT_MS = 2000
_TCP_HEARTBEAT_TIMEOUT_MS = 8000


class GatewayLane(Lane):
    """Sockets and registered ranks of one worker URL."""

    def __init__(self, url: str, options: LaneOptions, on_state: Callable[[LaneState, str], None]) -> None:
        super().__init__(url, options, on_state)
        self._sinks: dict[str, tuple[RequestSink, Rank]] = {}
        self._calls: dict[int, tuple[asyncio.Future[list[wire.ControlReplySlim]], list[wire.ControlReplySlim]]] = {}
        self._next_call = 0
        self._context = zmq.Context()
        self._judge: zmq.Socket[bytes] | None = None
        self._handshake: zmq.Socket[bytes] | None = None
        self._input: zmq.Socket[bytes] | None = None
        self._output: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._expected = 1
        self._vanished: dict[bytes, Rank] = {}
        """Ranks that said hello and seemed to go away again."""
        self._doomed = False
        self._looking = False
        """A message has gone in this turn of the loop, and a look at the request socket is on its way."""
        self._held: list[tuple[Rank, list[bytes]]] = []
        """Messages that go together, in their order."""
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- life ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind the sockets and wait for engines. Raises `AddressError` or `zmq.ZMQError` (address in use)."""
        self._loop = asyncio.get_running_loop()
        where = self._options.handshake_address or address.handshake_address(self.url)
        if self._options.curve is not None:
            self._judge = self._context.socket(zmq.REP)
            self._judge.bind(ZAP_ADDRESS)
            self._watch(self._judge, self._on_peer)
        self._handshake = self._socket(zmq.ROUTER)
        self._handshake.bind(where)
        self._watch(self._handshake, self._on_handshake)
        self._bind_data()
        self._set_state(LaneState.HANDSHAKE, f"waiting for an engine at {where}")

    def close(self) -> None:
        """Close every socket, also after an `open` that failed; requests in flight fail. May be called twice."""
        if self._context.closed:
            return
        self._send_held()
        self._close_data("the gateway is stopping")
        for socket in (self._handshake, self._judge):
            self._close_socket(socket)
        self._handshake = self._judge = None
        self._context.destroy(linger=100)
        self._set_state(LaneState.CLOSED, "closed")

    # ---- requests --------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Requests sent and not yet finished, aborted or failed."""
        return len(self._sinks)

    def submit(self, request: wire.PlainGenerateReqInput | wire.TokenizedGenerateReqInput, sink: RequestSink) -> None:
        """Send a request to the rank that is next. Raises `LaneNotReady` or `NoSuchRank`; then nothing was sent."""
        rank = self._next_rank(request.rid, request.rid in self._sinks, self._named_rank(request))
        if not self._send(rank, wire.encode_request(request)):
            raise LaneNotReady(f"worker {self.url} lost its engine")
        self._sinks[request.rid] = (sink, rank)
        self._begin(rank, request)

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests and tell their ranks; ids that have ended are skipped."""
        self._tell_end(request_ids, wire.encode_abort)

    def end(self, request_ids: list[str]) -> None:
        """The same for requests whose text is complete, which are no failures to an engine that can be told so."""
        told = "stop" in (self.ready_response.abort_reasons or ()) if self.state is LaneState.READY else False
        self._tell_end(request_ids, wire.encode_end if told else wire.encode_abort)

    def _tell_end(self, request_ids: list[str], encoded: Callable[[list[str]], list[bytes]]) -> None:
        by_rank: dict[bytes, list[str]] = {}
        for rid in request_ids:
            rank = self._forget(rid)
            if rank is not None:
                by_rank.setdefault(rank.identity, []).append(rid)
        for identity, rids in by_rank.items():
            if identity in self.ranks:
                self._send(self.ranks[identity], encoded(rids))

    def control(self, method: str, args: list[object]) -> asyncio.Future[list[wire.ControlReplySlim]]:
        """Call every rank; the future gives a reply a rank, or `LaneNotReady` when the engine is lost meanwhile."""
        self._check_ready()
        assert self._loop is not None  # it is open
        self._next_call += 1
        future: asyncio.Future[list[wire.ControlReplySlim]] = self._loop.create_future()
        self._calls[self._next_call] = (future, [])
        frames = wire.encode_control(wire.ControlCall(self._next_call, method, args))
        for rank in self.ranks.values():
            self._send(rank, frames)
        return future

    # ---- sockets ---------------------------------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self.url.startswith("tcp://"):
            # A host that vanishes closes no connection.
            socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TCP_HEARTBEAT_TIMEOUT_MS)
        secure_gateway(socket, self._options.curve)
        return socket

    def _on_peer(self, frames: list[bytes]) -> None:
        assert self._judge is not None and self._options.curve is not None
        self._judge.send_multipart(judge(frames, self._options.curve))

    def _bind_data(self) -> None:
        if self.url.startswith("ipc://"):
            address.prepare_ipc_directory(self.url)
        input_address, output_address = address.data_addresses(self.url)
        self._input = self._socket(zmq.ROUTER)
        self._monitor = self._input.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._input.bind(input_address)
        self._output = self._socket(zmq.PULL)
        self._output.bind(output_address)
        self._watch(self._input, self._on_registration)
        self._watch(self._monitor, self._on_disconnect)
        self._watch(self._output, self._on_output)

    def _close_data(self, reason: str) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._held.clear()
        if self._input is not None and self._monitor is not None:
            self._unwatch(self._monitor)
            self._input.disable_monitor()
        for socket in (self._input, self._output):
            self._close_socket(socket)
        self._input = self._output = self._monitor = None
        self.ranks.clear()
        self._vanished.clear()
        sinks, self._sinks = self._sinks, {}
        for sink, _ in sinks.values():
            sink.fail(reason)
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(LaneNotReady(reason))

    def _watch(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        # The descriptor of a ZMQ socket signals edges: every turn has to read until nothing is left.
        assert self._loop is not None
        self._loop.add_reader(descriptor(socket), self._drain, socket, on_frames)
        self._loop.call_soon(self._drain, socket, on_frames)

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        if self._loop is not None and not self._loop.is_closed() and not socket.closed:
            self._loop.remove_reader(descriptor(socket))

    def _close_socket(self, socket: zmq.Socket[bytes] | None) -> None:
        if socket is not None:
            self._unwatch(socket)
            socket.close()

    def _drain(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        for _ in range(_FRAMES_PER_TURN):
            if socket.closed or not readable(socket):
                return
            try:
                on_frames(socket.recv_multipart(zmq.NOBLOCK))
            except wire.WireError as error:
                self.dropped["unreadable"] += 1
                logger.warning("worker %s: dropped a frame that cannot be read: %s", self.url, error)
        assert self._loop is not None
        self._loop.call_soon(self._drain, socket, on_frames)

    def _send(self, rank: Rank, frames: list[bytes]) -> bool:
        """Send to a rank, or hold the message for a moment; False when it is gone (its loss is on its way then)."""
        if self._looking:
            self._held.append((rank, frames))
            if len(self._held) >= _HELD_MESSAGES:
                self._send_held()
            return True
        return self._put(rank, frames)

    def _send_held(self) -> None:
        held, self._held = self._held, []
        for rank, frames in held:
            if not self._put(rank, frames):
                return  # with the rank, all that is in flight will be lost

    def _put(self, rank: Rank, frames: list[bytes]) -> bool:
        assert self._input is not None and self._loop is not None
        try:
            send(self._input, [rank.identity, *frames])
        except (zmq.Again, zmq.ZMQError) as error:
            logger.warning("worker %s: rank %d cannot be reached: %s", self.url, rank.index, error)
            self._lose_soon(f"rank {rank.index} cannot be reached")
            return False
        # A send may swallow the edge that announced a message to read; one look after all sends of a turn will do.
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)
        return True

    def _look(self) -> None:
        if self._input is not None:
            self._send_held()
        self._looking = False
        if self._input is not None:
            self._drain(self._input, self._on_registration)

    # ---- handshake -------------------------------------------------------------------------------------------

    def _on_handshake(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise wire.WireError(f"a handshake message has one frame, got {len(frames) - 1}")
        identity, payload = frames
        message = wire.decode_handshake(payload)
        if isinstance(message, wire.Hello):
            rank = self.ranks.get(identity)
            if self._doomed or (rank is not None and rank.response is not None):
                self._lose(f"rank {Rank.index_of(identity)} dialled again")
            self._welcome(identity, message, 0.0)
        elif identity in self.ranks:
            self.ranks[identity].heard_s = time.monotonic()
            logger.debug("worker %s: rank %d has loaded its model", self.url, Rank.index_of(identity))

    def _welcome(self, identity: bytes, hello: wire.Hello, look_s: float) -> None:
        """look_s: how long it has waited since the last time; 0 when it has just said hello."""
        if not self.ranks:
            self._expected = self._options.engine_count or (hello.engine_count or 1)
            self._later(self._options.startup_timeout_s, self._expire)
        # A rank that has not registered yet may say hello again (its first connection broke, say): the same answer
        # is right whichever of the two it reads.
        if identity not in self.ranks and len(self.ranks) >= self._expected:
            if not look_s:
                logger.warning("worker %s: rank %d is one too many", self.url, Rank.index_of(identity))
                self.dropped["surplus_rank"] += 1
            if self.state is not LaneState.READY:
                # It says hello once. One of those before it may still go away.
                next_s = min(2 * look_s, _LONGEST_LOOK_S) or _FIRST_LOOK_S
                self._later(next_s, self._welcome, identity, hello, next_s)
            return
        self.ranks[identity] = rank = Rank(identity)
        rank.heard_s, rank.num_declared = time.monotonic(), hello.engine_count or 1
        if not self._send_init(identity):
            del self.ranks[identity]
        self._later(_REGISTERS_S, self._look_for_vanished, _REGISTERS_S)

    def _look_for_vanished(self, waited_s: float) -> None:
        """Who said hello and went away, before it had registered, holds no place and declares no number of ranks.

        An engine registers at once after its READY, or is still connected: so whoever is neither has gone.
        """
        if self.state is LaneState.READY:
            return
        now_s = time.monotonic()
        for identity, rank in list(self.ranks.items()):
            silent = rank.response is None and now_s - rank.heard_s >= _REGISTERS_S
            if silent and not self._send_init(identity):
                logger.warning("worker %s: rank %d has gone again", self.url, rank.index)
                self._vanished[identity] = self.ranks.pop(identity)
        if self.ranks:
            first = next(iter(self.ranks.values()))
            self._expected = self._options.engine_count or first.num_declared
            self._check_complete()
        if any(rank.response is None for rank in self.ranks.values()):
            next_s = min(2 * waited_s, _LONGEST_LOOK_S)
            self._later(next_s, self._look_for_vanished, next_s)

    def _send_init(self, identity: bytes) -> bool:
        """Answer a hello, once more if need be; False when nobody is there to hear it."""
        assert self._handshake is not None and self._input is not None and self._output is not None
        addresses = wire.InitAddresses(
            inputs=[self._input.get_string(zmq.LAST_ENDPOINT)],
            outputs=[self._output.get_string(zmq.LAST_ENDPOINT)],
            coordinator_input=None,
            coordinator_output=None,
            frontend_stats_publish_address=None,
        )
        try:
            self._handshake.send_multipart([identity, wire.encode(wire.Init(addresses, {}))], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _on_registration(self, frames: list[bytes]) -> None:
        identity, payload = frames[0], frames[-1]
        response = wire.decode_ready_response(payload)
        rank = self.ranks.get(identity)
        if rank is None and identity in self._vanished and len(self.ranks) < self._expected:
            rank = self.ranks[identity] = self._vanished.pop(identity)  # it was only slow
        if rank is None:
            self.dropped["unknown_rank"] += 1
            logger.warning("worker %s: a rank registered without saying hello", self.url)
            return
        rank.response = response
        self._check_complete()

    def _check_complete(self) -> None:
        if len(self.ranks) == self._expected and all(r.response is not None for r in self.ranks.values()):
            self.last_output_s = time.monotonic()
            self._set_state(LaneState.READY, f"{self._expected} rank(s) registered")

    def _expire(self) -> None:
        if self.state is LaneState.HANDSHAKE:
            self._lose(f"only {len(self.ranks)} of {self._expected} ranks registered in time")

    # ---- results ---------------------------------------------------------------------------------------------

    def _on_output(self, frames: list[bytes]) -> None:
        payload = frames[0]
        if payload == wire.ENGINE_CORE_DEAD:
            self._lose("the engine says that it is going away")
            return
        message = wire.decode_output(payload)
        if isinstance(message, wire.ControlReplySlim):
            self._on_reply(message)
            return
        now = self.last_output_s = time.monotonic()
        rank = self.ranks.get(wire.identity_of(message.engine_index))
        if rank is not None:
            rank.on_batch(message, now)
        self._on_batch(message, payload)

    def _on_batch(self, message: wire.BatchTokenIDOutSlim, payload: bytes) -> None:
        sinks = self._sinks
        for row, rid in enumerate(message.rids):
            entry = sinks.get(rid)
            if entry is None:
                # Normal after an abort: steps in flight still carry the request.
                self.dropped["unknown_request"] += 1
                continue
            if message.finished_reasons[row]:
                self._forget(rid)
            entry[0].push(message, row)

    def _on_reply(self, reply: wire.ControlReplySlim) -> None:
        entry = self._calls.get(reply.call_id) if isinstance(reply.call_id, int) else None
        if entry is None:
            self.dropped["unknown_call"] += 1
            return
        future, replies = entry
        replies.append(reply)
        if len(replies) == len(self.ranks):
            del self._calls[int(reply.call_id)]
            if not future.done():
                future.set_result(replies)

    def _forget(self, rid: str) -> Rank | None:
        entry = self._sinks.pop(rid, None)
        if entry is None:
            return None
        entry[1].end()
        return entry[1]

    # ---- loss ------------------------------------------------------------------------------------------------

    def _on_disconnect(self, frames: list[bytes]) -> None:
        if self.ranks:
            self._lose_soon("an engine disconnected")

    def _lose_soon(self, reason: str) -> None:
        if self.state is LaneState.READY:
            self._set_state(LaneState.HANDSHAKE, reason)
        self._doomed = True
        self._later(_LAST_WORDS_S, self._lose, reason)

    def _lose(self, reason: str) -> None:
        self._close_data(f"worker {self.url}: {reason}")
        self._doomed = False
        self._bind_data()
        self._set_state(LaneState.HANDSHAKE, reason)

    def _later(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        self._timers.append(self._loop.call_later(delay_s, call, *args))
