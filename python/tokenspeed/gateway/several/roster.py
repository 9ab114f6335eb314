# SPDX-License-Identifier: MIT
"""What the process in front of several gateways knows for all of them: the workers, and the table of routing keys.

It listens on a Unix socket in their private folder. `GET /workers` gives the list, `POST /workers` changes it (`add`,
`change` or `remove`) and tells all gateways before it answers; `POST /keys` gives the worker of a routing key. A worker
that is removed keeps its relay until every gateway is done with it. Lives on the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq
from aiohttp import web

from tokenspeed.config.gateway import GatewayConfig
from tokenspeed.config.member import Member, Seat, Seating, has_lane
from tokenspeed.gateway.route.policies import make_table
from tokenspeed.gateway.route.policy import Asked
from tokenspeed.gateway.route.shared_keys import KeyTold
from tokenspeed.gateway.several.door import ask
from tokenspeed.rpc.lane.address import AddressError, split_grpc
from tokenspeed.rpc.lane.base import LaneOptions
from tokenspeed.rpc.lane.relay import Relay

logger = logging.getLogger(__name__)


class Change(msgspec.Struct, frozen=True):
    """The body of `POST /workers`. priority: that of a worker that is added or changed."""

    kind: str
    url: str
    priority: int = 0


class KeyAsked(msgspec.Struct, frozen=True):
    """The body of `POST /keys`: workers that may take the request, with the requests that the asking process has."""

    key: str
    workers: list[tuple[str, int]]


@dataclass
class _Entry:
    seat: Seat
    relay: Relay | None
    """None: gateways dial the worker themselves."""
    leaving: bool = False


@dataclass(frozen=True)
class _Candidate:
    """A worker as the table of keys sees it."""

    url: str
    num_in_flight: int


class Roster:
    """`members` are all gateways."""

    def __init__(self, config: GatewayConfig, members: Sequence[Member]) -> None:
        self._members = members
        self._options = LaneOptions(config.engine_count, None, config.engine_startup_timeout_s, config.curve)
        self._entries: dict[str, _Entry] = {}
        self._num_seats = self._num_changes = 0
        self._keys = make_table(config.routing)
        self._first = config.worker_urls
        self._runner: web.AppRunner | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Bind the lanes of the first workers, and listen. Raises `AddressError`, `zmq.ZMQError`, `OSError`."""
        for url in self._first:
            if url not in self._entries:
                self._add(url, 0)
        app = web.Application()
        app.add_routes(
            [web.get("/workers", self._list), web.post("/workers", self._change), web.post("/keys", self._key)]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._members[0].front)).start()

    async def close(self) -> None:
        """Stop listening, and close every lane."""
        for task in self._leaving:
            task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        for entry in self._entries.values():
            if entry.relay is not None:
                entry.relay.close()

    @property
    def seating(self) -> Seating:
        """Workers that serve, in the order in which they came."""
        return Seating(self._num_changes, [entry.seat for entry in self._entries.values() if not entry.leaving])

    def _add(self, url: str, priority: int) -> None:
        seat = Seat(self._num_seats, url, priority)
        relay = None
        if has_lane(url):
            homes = [member.handshake_address(seat.number) for member in self._members]
            relay = Relay(url, replace(self._options), homes)
            try:
                relay.open()
            except BaseException:
                relay.close()
                raise
        else:
            split_grpc(url)  # here, because gateways have no way to turn it down
        self._num_seats += 1
        self._entries[url] = _Entry(seat, relay)

    async def _list(self, request: web.Request) -> web.Response:
        return _json(self.seating)

    async def _change(self, request: web.Request) -> web.Response:
        change = msgspec.json.decode(await request.read(), type=Change)
        entry = self._entries.get(change.url)
        if change.kind == "add":
            if entry is not None:
                return _refusal(409, "WORKER_ALREADY_EXISTS", f"worker {change.url} is here already")
            try:
                self._add(change.url, change.priority)
            except (AddressError, zmq.ZMQError, OSError) as error:
                return _refusal(400, "invalid_value", f"the worker's lane cannot be opened: {error}")
        elif entry is None or entry.leaving:
            return _refusal(404, "worker_not_found", f"there is no worker {change.url!r}")
        elif change.kind == "change":
            entry.seat = replace(entry.seat, priority=change.priority)
        else:
            entry.leaving = True
            if entry.relay is not None:
                entry.relay.leave()
        self._num_changes += 1
        await self._tell("/seats", msgspec.json.encode(self.seating))
        if change.kind == "remove":
            assert entry is not None
            task = asyncio.create_task(self._let_go(entry))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        return _json({})

    async def _let_go(self, entry: _Entry) -> None:
        """Close the relay when no gateway has a request there."""
        await self._tell("/retired", msgspec.json.encode(entry.seat.url), None)
        if entry.relay is not None:
            entry.relay.close()
        del self._entries[entry.seat.url]
        logger.info("worker %s is removed", entry.seat.url)

    async def _tell(self, path: str, body: bytes, timeout_s: float | None = 5.0) -> None:
        """Post to all gateways; one that is being started asks for the list itself."""
        doors = [member.door for member in self._members if member.door.exists()]
        await asyncio.gather(*(ask("POST", door, path, body, timeout_s) for door in doors))

    async def _key(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=KeyAsked)
        choice = self._keys.choose(list(self._candidates(asked.workers)), Asked((), asked.key))
        numbers = {url: self._keys.num_keys(url) for url in self._entries}
        return _json(KeyTold(choice.worker.url, choice.branch, self._keys.num_remembered, numbers))

    def _candidates(self, workers: Iterable[tuple[str, int]]) -> Iterable[Any]:
        """With the load of all gateways, where it is known here."""
        for url, load in workers:
            entry = self._entries.get(url)
            relay = None if entry is None else entry.relay
            yield _Candidate(url, load if relay is None else relay.num_in_flight)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _refusal(status: int, code: str, message: str) -> web.Response:
    body = msgspec.json.encode({"code": code, "message": message})
    return web.Response(body=body, status=status, content_type="application/json")
