# SPDX-License-Identifier: MIT
"""What operators ask of a running gateway: loads, an empty cache, profiles, and workers that come and go.

`GET /get_loads` (and `/loads`), `POST /flush_cache`, `/start_profile` and `/stop_profile`, and `/workers`. Every path
needs a key where keys are set. A worker that is deleted gets no new requests and is gone when those in flight have
ended; the tasks that wait for that are kept here. Lives on the loop's thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
import zmq
from aiohttp import web

from tokenspeed.gateway.chat.fields import parse_body
from tokenspeed.gateway.chat.format import encode_json
from tokenspeed.gateway.http.auth import KeyCheck
from tokenspeed.gateway.http.body import read_body
from tokenspeed.gateway.http.errors import ApiError, invalid, no_available_workers
from tokenspeed.gateway.route.router import DuplicateWorker, Router
from tokenspeed.gateway.route.worker import Worker
from tokenspeed.rpc.lane.address import AddressError
from tokenspeed.rpc.lane.base import LaneNotReady

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT_S = 30.0
_PROFILE_TIMEOUT_S = 600.0  # writing a long trace takes minutes

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class WorkerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /workers`. Workers of a higher priority are asked first."""

    url: str
    priority: int = 0


class WorkerChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PUT` and `PATCH /workers/{id}`: PUT sets what is not named to its default, PATCH leaves it."""

    url: str | None = None
    priority: int | None = None


_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`POST /start_profile`; engines say what the fields may be. `output_dir` is for their own control ports: who may
    ask a gateway need not choose where its engines write."""

    start_step: _Count | None = None
    num_steps: _Count | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool | None = None
    profile_prefix: str | None = None
    output_dir: str | None = None


@dataclass(frozen=True)
class Drain:
    """How a worker leaves: it drains for at least `settle_s`, and its requests have `grace_s` to end."""

    settle_s: float
    grace_s: float


class Others(Protocol):
    """The way to the other gateway processes on the port."""

    async def loads(self) -> list[bytes]:
        """What each knows of its workers: `own_loads`."""

    async def tell_flushed(self, urls: list[str]) -> None:
        """The caches of these workers are empty."""


class Front(Protocol):
    """Where there are several gateway processes: the one that knows the workers of all. Each raises `ApiError`."""

    async def add(self, url: str, priority: int) -> None:
        """A new worker for all."""

    async def change(self, url: str, priority: int) -> None:
        """Another priority."""

    async def remove(self, url: str) -> None:
        """A worker drains in all processes, and is removed."""


class AdminApi:
    """`routes` are ready to be added to the server's. `spawn` starts a task whose failure does not pass unseen."""

    def __init__(self, router: Router, keys: KeyCheck, spawn: Spawn, drain: Drain) -> None:
        self._router, self._keys, self._spawn, self._drain = router, keys, spawn, drain
        self.front: Front | None = None
        """Where changes of workers go to; None: there is no other process."""
        self.others: Others | None = None
        """The other gateway processes on the port; None: there are none."""
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def routes(self) -> list[web.RouteDef]:
        """Every path of this API."""
        return [
            *self.public_routes(),
            web.get("/get_loads", self._loads),
            web.post("/flush_cache", self._flush),
            web.post("/start_profile", self._start_profile),
            web.post("/stop_profile", self._stop_profile),
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.get("/workers/{id}", self._get),
            web.put("/workers/{id}", self._change),
            web.patch("/workers/{id}", self._change),
            web.delete("/workers/{id}", self._delete),
        ]

    def public_routes(self) -> list[web.RouteDef]:
        """What stays on the main port when operators have one of their own."""
        return [web.get("/loads", self._loads)]

    def close(self) -> None:
        """Stop waiting for workers that drain; none is removed any more."""
        self._closed = True
        for task in self._retiring.values():
            task.cancel()

    # ---- loads and caches --------------------------------------------------------------------------------------

    async def _loads(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        loads = self._own_loads()
        if self.others is not None:
            loads = joined_loads([loads, *map(json.loads, await self.others.loads())])
        for load in loads:
            for rank in load["ranks"]:
                del rank["told_s"]
        return _json({"workers": loads}, 200)

    def _own_loads(self) -> list[dict[str, Any]]:
        return [_load(worker) for worker in self._router.workers]

    def own_loads(self) -> bytes:
        """What this process knows of its workers, for other processes on the port."""
        return encode_json(self._own_loads())

    def were_flushed(self, urls: Sequence[str]) -> None:
        """The caches of these workers are empty."""
        for url in urls:
            self._router.policy.forget(url)

    async def _flush(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        results = await self._ask_all("flush_cache", [_CONTROL_TIMEOUT_S], _CONTROL_TIMEOUT_S)
        flushed = [result["url"] for result in results if result["success"]]
        self.were_flushed(flushed)
        if self.others is not None:
            await self.others.tell_flushed(flushed)
        counts = {"workers_flushed": len(flushed), "total_workers": len(results)}
        return _told(results, counts, "flush_incomplete", "did not flush their caches")

    async def _start_profile(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        asked, _ = await parse_body(await read_body(request) or b"{}", ProfileBody)
        if asked.output_dir is not None:
            raise invalid("output_dir", "unsupported_parameter", "output_dir is taken by an engine's own control port")
        results = await self._ask_all("start_profile", [msgspec.to_builtins(asked)], _CONTROL_TIMEOUT_S)
        return _told(results, {}, "profile_refused", "do not record")

    async def _stop_profile(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        results = await self._ask_all("stop_profile", [], _PROFILE_TIMEOUT_S)
        return _told(results, {}, "profile_refused", "wrote no trace")

    async def _ask_all(self, method: str, args: list[object], timeout_s: float) -> list[dict[str, Any]]:
        """What became of a call to every worker's engine."""
        workers = list(self._router.workers)
        if not any(worker.model for worker in workers):
            raise no_available_workers(f"no worker has an engine that could be asked for {method}")
        return await asyncio.gather(*(_ask(worker, method, args, timeout_s) for worker in workers))

    # ---- workers -----------------------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        workers = [_worker_object(worker) for worker in self._router.workers]
        return _json({"workers": workers, "total": len(workers)}, 200)

    async def _get(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        return _json(_worker_object(self._find(request)), 200)

    async def _add(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        asked, _ = await parse_body(await read_body(request), WorkerBody)
        worker = self._add_here(asked) if self.front is None else await self._add_everywhere(self.front, asked)
        return _accepted(worker, f"worker {worker.url} was added; it serves when its engine has dialled")

    async def _add_everywhere(self, front: Front, asked: WorkerBody) -> Worker:
        await front.add(asked.url, asked.priority)
        worker = self._router.find(asked.url)
        if worker is None:
            raise ApiError(404, "worker_not_found", f"worker {asked.url} was added, and removed at once")
        return worker

    def _add_here(self, asked: WorkerBody) -> Worker:
        try:
            worker = self._router.add(asked.url)
        except DuplicateWorker:
            raise ApiError(409, "WORKER_ALREADY_EXISTS", f"worker {asked.url} is here already", "url") from None
        except (AddressError, zmq.ZMQError, OSError) as error:
            raise invalid("url", "invalid_value", f"the worker's lane cannot be opened: {error}") from None
        worker.priority = asked.priority
        return worker

    async def _change(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        worker = self._find(request)
        asked, _ = await parse_body(await read_body(request), WorkerChange)
        if asked.url not in (None, worker.url):
            raise invalid("url", "invalid_value", "a worker's URL cannot change; delete this one and add another")
        if asked.priority is not None or request.method == "PUT":
            priority = asked.priority or 0
            if self.front is None:
                worker.priority = priority
            else:
                await self.front.change(worker.url, priority)
        return _accepted(worker, f"worker {worker.url} has priority {worker.priority}")

    async def _delete(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        worker = self._find(request)
        if self.front is None:
            self.retire(worker)
        else:
            await self.front.remove(worker.url)
        return _accepted(worker, f"worker {worker.url} drains and will be removed")

    def lost(self, worker: Worker) -> None:
        """A worker is lost, and nobody is to wait for it: it is removed, by all processes."""
        if self.front is None:
            self.retire(worker)
        elif not self._closed and not worker.draining:
            self._spawn(self._leave(self.front, worker.url))

    async def _leave(self, front: Front, url: str) -> None:
        try:
            await front.remove(url)
        except ApiError as error:
            logger.info("worker %s, which is lost: %s", url, error.message)  # another process was first, mostly

    def retire(self, worker: Worker) -> None:
        """Let a worker drain, and remove it from this process; once."""
        if worker.url not in self._retiring and not self._closed:
            task = self._spawn(self._router.retire(worker, self._drain.settle_s, self._drain.grace_s))
            self._retiring[worker.url] = task
            task.add_done_callback(lambda _: self._retiring.pop(worker.url))

    async def retired(self, url: str) -> None:
        """Wait until a worker that drains is gone."""
        task = self._retiring.get(url)
        if task is not None:
            await asyncio.wait([task])

    def _find(self, request: web.Request) -> Worker:
        wanted = request.match_info["id"]
        for worker in self._router.workers:
            if worker.id == wanted:
                return worker
        raise ApiError(404, "worker_not_found", f"there is no worker {wanted!r}")


def _load(worker: Worker) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank.index,
            "in_flight": rank.num_in_flight,
            "running": rank.num_running,
            "waiting": rank.num_waiting,
            "kv_active_blocks": rank.active_blocks,
            "kv_total_blocks": rank.total_blocks,
            "told_s": rank.load_s,
        }
        for rank in worker.lane.ranks.values()
    ]
    return {"worker": worker.url, "state": worker.state().value, "load": worker.num_in_flight, "ranks": ranks}


def joined_loads(views: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One view of several processes' of the same workers: each has requests of its own in flight, and of an engine's
    numbers the last that were told count. Clocks are the machine's."""
    joined: dict[str, dict[str, Any]] = {}
    for load in (load for view in views for load in view):
        known = joined.setdefault(load["worker"], {**load, "load": 0, "ranks": []})
        known["load"] += load["load"]
        ranks = {rank["rank"]: rank for rank in known["ranks"]}
        for rank in load["ranks"]:
            other = ranks.get(rank["rank"])
            latest = rank if other is None or rank["told_s"] > other["told_s"] else other
            in_flight = rank["in_flight"] + (0 if other is None else other["in_flight"])
            ranks[rank["rank"]] = {**latest, "in_flight": in_flight}
        known["ranks"] = [ranks[number] for number in sorted(ranks)]
    return list(joined.values())


def _worker_object(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.id,
        "url": worker.url,
        "model": worker.model,
        "connection_mode": worker.connection_mode,
        "state": worker.state().value,
        "reason": worker.reason,
        "priority": worker.priority,
        "cached_blocks": worker.blocks.num_blocks if worker.blocks.known else None,
        "overloaded": worker.is_overloaded,
        "circuit_breaker": worker.breaker.state.name.lower(),
        "load": worker.num_in_flight,
        "ranks": len(worker.lane.ranks),
    }


async def _ask(worker: Worker, method: str, args: list[object], timeout_s: float) -> dict[str, Any]:
    """What became of a call to one worker's engine; it succeeded when all its ranks say so."""
    try:
        async with asyncio.timeout(timeout_s):
            replies = await worker.lane.control(method, args)
    except LaneNotReady as error:
        return {"url": worker.url, "success": False, "message": str(error)}
    except TimeoutError:
        return {"url": worker.url, "success": False, "message": f"no answer in {timeout_s:g} s"}
    refusals = [f"rank {reply.engine_index}: {reply.message}" for reply in replies if not reply.success]
    said = refusals or sorted({reply.message for reply in replies})
    return {"url": worker.url, "success": not refusals, "message": "; ".join(said)}


def _told(results: list[dict[str, Any]], counts: Mapping[str, int], code: str, what: str) -> web.Response:
    """200 when every worker succeeded, or a 409 that names the others; `results` and `counts` with either."""
    failed = ", ".join(result["url"] for result in results if not result["success"])
    body: dict[str, Any] = {"success": not failed, **counts, "workers": results}
    if not failed:
        return _json(body, 200)
    error = ApiError(409, code, f"these workers {what}: {failed}")
    response = _json({"error": error.fields, **body}, error.status)
    response.headers.update(error.headers)
    return response


def _accepted(worker: Worker, message: str) -> web.Response:
    location = f"/workers/{worker.id}"
    body = {"status": "accepted", "worker_id": worker.id, "url": worker.url, "location": location, "message": message}
    response = _json(body, 202)
    response.headers["location"] = location
    return response


def _json(value: object, status: int) -> web.Response:
    return web.Response(body=encode_json(value), status=status, content_type="application/json")
