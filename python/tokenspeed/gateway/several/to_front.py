# SPDX-License-Identifier: MIT
"""The way of a gateway process to the one in front (`Roster`), and what it does with the list of workers from there.

Every process has the workers of that list: each change goes there first and comes back to all. Lives on the loop's
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import aiohttp
import msgspec

from tokenspeed.config.member import Member, Seating
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.route.shared_keys import KeyTold
from tokenspeed.gateway.route.worker import Worker
from tokenspeed.gateway.start_error import StartError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


class ToFront:
    """An async context manager; its connections stay open. `urls`: the workers at its start. `lanes`: where the router
    looks for this process's lane of a worker."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.urls: list[str] = []
        self.lanes: dict[str, tuple[str, str]] = {}
        self._number = 0
        """Of the last list."""
        self._session: aiohttp.ClientSession
        self._path = str(member.front)

    async def __aenter__(self) -> ToFront:
        connector = aiohttp.UnixConnector(self._path)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            seating = await self.seating()
        except ApiError as error:
            await self._session.close()
            raise StartError(error.message, 1) from None
        self._number = seating.number
        self.urls = [seat.url for seat in seating.seats]
        self.lanes.update(self.member.private_lanes(seating.seats))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def seating(self) -> Seating:
        """The workers of all processes."""
        return msgspec.json.decode(await self._ask("GET", "/workers"), type=Seating)

    async def add(self, url: str, priority: int) -> None:
        """A new worker for all processes. Raises `ApiError`."""
        await self._change("add", url, priority)

    async def change(self, url: str, priority: int) -> None:
        """Another priority of a worker. Raises `ApiError`."""
        await self._change("change", url, priority)

    async def remove(self, url: str) -> None:
        """A worker drains in all processes, and is removed. Raises `ApiError`."""
        await self._change("remove", url, 0)

    async def key(self, key: str, workers: list[tuple[str, int]]) -> KeyTold | None:
        """The worker of a routing key; None where the process in front does not answer."""
        try:
            answer = await self._ask("POST", "/keys", {"key": key, "workers": workers})
        except ApiError as error:
            logger.warning("a routing key cannot be looked up: %s", error.message)
            return None
        return msgspec.json.decode(answer, type=KeyTold)

    def apply(self, seating: Seating, router: Router, retire: Callable[[Worker], None]) -> None:
        """Make a router's workers those of the list, unless a later one was here. retire: lets one drain, and removes
        it."""
        if seating.number < self._number:
            return
        self._number = seating.number
        wanted = {seat.url: seat for seat in seating.seats}
        for worker in list(router.workers):
            if worker.url not in wanted:
                retire(worker)
        known = {worker.url: worker for worker in router.workers}
        for seat in wanted.values():
            self.lanes.update(self.member.private_lanes([seat]))
            worker = known.get(seat.url) or router.add(seat.url)
            worker.priority = seat.priority

    async def _change(self, kind: str, url: str, priority: int) -> None:
        await self._ask("POST", "/workers", {"kind": kind, "url": url, "priority": priority})

    async def _ask(self, method: str, path: str, body: object = None) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, f"http://front{path}", data=data) as answer:
                content = await answer.read()
                if answer.status == 200:
                    return content
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(503, "front_unreachable", f"the process in front does not answer: {error}") from None
        if status >= 500:
            raise ApiError(503, "front_unreachable", f"the process in front failed ({status})")
        told = msgspec.json.decode(content)
        raise ApiError(status, told["code"], told["message"], "url")
