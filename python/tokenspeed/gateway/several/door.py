# SPDX-License-Identifier: MIT
"""How the gateway processes of one port reach each other: a Unix socket each, in their private folder.

`GET /metrics` gives one process's own counts, `GET /loads` its view of its workers, `GET /ready` says whether it has
one; `POST /responses/{id}/stop` ends a background response, if it runs there, and `POST /flushed` says that workers'
caches are empty. The process in front posts the workers of all to `/seats`, and to `/retired` the URL of one that was
removed: the answer comes when this process is done with it. A process that is away (it is being started again) is
passed over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from tokenspeed.config.member import Member, Seating
from tokenspeed.gateway.several.totals import added_up

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Room:
    """What is behind a door, of this process alone."""

    metrics: Callable[[], bytes]
    """The text of its own metrics."""
    ready: Callable[[], bool]
    """Whether it has a worker."""
    loads: Callable[[], bytes]
    """Its view of its workers, as JSON."""
    stop: Callable[[str], Awaitable[None]]
    """Ends a response, if it runs here."""
    flushed: Callable[[list[str]], None]
    """Hears the URLs of workers whose caches are empty."""
    seated: Callable[[Seating], None]
    """Hears of the workers that all processes have."""
    retired: Callable[[str], Awaitable[None]]
    """Waits until a worker that was removed is gone."""


class Door:
    """This process's door and the way to the others'."""

    def __init__(self, member: Member, room: Room) -> None:
        self._member, self._room = member, room
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Listen. From then on the process in front knows that this one serves."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/ready", self._readiness),
                web.get("/loads", self._loads),
                web.post("/responses/{id}/stop", self._stopped),
                web.post("/flushed", self._flushed),
                web.post("/seats", self._seats),
                web.post("/retired", self._retired),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        self._member.door.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self._member.door)).start()

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def metrics(self) -> bytes:
        """The text of /metrics for all processes together."""
        others = await asyncio.gather(*(ask("GET", door, "/metrics") for door in self._others()))
        return added_up([self._room.metrics(), *(text for text in others if text is not None)])

    async def loads(self) -> list[bytes]:
        """The views of all other processes that can be asked."""
        answers = await asyncio.gather(*(ask("GET", door, "/loads") for door in self._others() if door.exists()))
        return [answer for answer in answers if answer is not None]

    async def tell_flushed(self, urls: list[str]) -> None:
        """The caches of these workers are empty."""
        body = json.dumps(urls).encode()
        await asyncio.gather(*(ask("POST", door, "/flushed", body) for door in self._others() if door.exists()))

    async def others_ready(self) -> bool:
        """Whether every other process that can be asked has a worker: the next connection may be any one's."""
        answers = await asyncio.gather(*(ask("GET", door, "/ready") for door in self._others() if door.exists()))
        return b"no" not in answers

    async def stop_everywhere(self, response_id: str) -> None:
        """End a background response, wherever it runs."""
        await asyncio.gather(*(ask("POST", door, f"/responses/{response_id}/stop") for door in self._others()))

    def _others(self) -> list[Path]:
        return [door for door in self._member.siblings if door != self._member.door]

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._room.metrics())

    async def _readiness(self, request: web.Request) -> web.Response:
        return web.Response(body=b"yes" if self._room.ready() else b"no")

    async def _stopped(self, request: web.Request) -> web.Response:
        await self._room.stop(request.match_info["id"])
        return web.Response()

    async def _loads(self, request: web.Request) -> web.Response:
        return web.Response(body=self._room.loads())

    async def _flushed(self, request: web.Request) -> web.Response:
        self._room.flushed(await request.json())
        return web.Response()

    async def _seats(self, request: web.Request) -> web.Response:
        self._room.seated(msgspec.json.decode(await request.read(), type=Seating))
        return web.Response()

    async def _retired(self, request: web.Request) -> web.Response:
        await self._room.retired(await request.json())
        return web.Response()


async def ask(
    method: str, door: Path, path: str, body: bytes | None = None, timeout_s: float | None = _TIMEOUT_S
) -> bytes | None:
    """The answer from behind a door; None: there is none."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(door)), timeout=timeout) as session,
            session.request(method, f"http://gateway{path}", data=body) as answer,
        ):
            return await answer.read() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        logger.warning("the gateway process behind %s does not answer: %s", door.name, error)
        return None
