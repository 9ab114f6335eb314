# SPDX-License-Identifier: MIT
"""Handlers of `/v1/responses` and `/v1/conversations`: what is stored, what runs in the background.

A record belongs to the API key that made it; another key cannot see that it exists. A background response runs as a
task of this process: it is stored as queued, and its end is stored like any other. Cancelling it aborts its request
on the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from tokenspeed.gateway.chat.fields import parse_body
from tokenspeed.gateway.chat.format import encode_json
from tokenspeed.gateway.chat.job import Job
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.history.store import History
from tokenspeed.gateway.http.auth import KeyCheck, presented_key
from tokenspeed.gateway.http.body import read_body
from tokenspeed.gateway.http.errors import ApiError, invalid
from tokenspeed.gateway.http.service import Service
from tokenspeed.gateway.responses.format import ResponsesFormat
from tokenspeed.gateway.responses.items import Item, input_items, new_id
from tokenspeed.gateway.responses.request import Before, ResponsesRequest, check, response_job

logger = logging.getLogger(__name__)
_MAX_CHAIN = 1000
_PAGE, _LARGEST_PAGE = 20, 100
_RUNNING = ("queued", "in_progress")
_BELIEVED_S, _RENEWED_S = 90.0, 20.0
"""How long a response is believed to run without word of the process that runs it, and how often that gives word."""
_LOST = ApiError(500, "server_error", "the server that ran the response ended before it")
_CANCELLED = ApiError(499, "cancelled", "the response was cancelled")


class ConversationBody(msgspec.Struct, frozen=True, kw_only=True):
    """A new conversation, or changes of its metadata."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ItemsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Items to add."""

    items: list[dict[str, Any]]


class ResponsesApi:
    """`routes` are ready to be added to the server's."""

    def __init__(self, service: Service, keys: KeyCheck, history: History, max_background: int) -> None:
        """max_background: responses that run in the background at once."""
        self._service, self._keys, self._history = service, keys, history
        self._max_background = max_background
        self._running: dict[str, asyncio.Task[None]] = {}
        self._num_starting = 0

    def routes(self) -> list[web.RouteDef]:
        """Every path of both APIs."""
        one, conversation = "/v1/responses/{id}", "/v1/conversations/{id}"
        return [
            web.post("/v1/responses", self._create),
            web.get(one, self._get),
            web.delete(one, self._delete),
            web.post(one + "/cancel", self._cancel),
            web.get(one + "/input_items", self._input_items),
            web.post("/v1/conversations", self._create_conversation),
            web.get(conversation, self._get_conversation),
            web.post(conversation, self._update_conversation),
            web.delete(conversation, self._delete_conversation),
            web.post(conversation + "/items", self._add_items),
            web.get(conversation + "/items", self._list_items),
            web.get(conversation + "/items/{item}", self._get_item),
            web.delete(conversation + "/items/{item}", self._delete_item),
        ]

    async def close(self) -> None:
        """End what runs in the background; each of them is stored as cancelled."""
        for task in list(self._running.values()):
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    # ---- responses ---------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        owner = self._owner(request)
        asked, raw = await parse_body(await read_body(request), ResponsesRequest)
        check(asked, raw)
        response_id = new_id("resp")
        before = await self._before(asked, owner)

        def store(body: dict[str, Any]) -> None:
            self._store(owner, asked, before, body)

        async def make_job(_body: bytes, model: ServedModel, _request_id: str) -> Job:
            return await response_job(asked, raw, before, response_id, model, store)

        if not asked.background:
            return await self._service.handle(request, response_id, make_job)
        job = await make_job(b"", self._service.model, response_id)
        if len(self._running) + self._num_starting >= self._max_background:
            message = f"{self._max_background} responses run in the background already"
            raise ApiError(429, "too_many_background_responses", message, None, 1)
        form = job.format
        assert isinstance(form, ResponsesFormat)
        self._num_starting += 1
        try:
            await self._history.write("response", owner, response_id, _running(before, form.body))
        finally:
            self._num_starting -= 1
        task = asyncio.create_task(self._run(owner, before, job, form))
        self._running[response_id] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._running[response_id]
            if task.cancelled():  # before it began
                form.failed(_CANCELLED)

        task.add_done_callback(ended)
        return _json(form.body)

    async def _run(self, owner: str, before: Before, job: Job, form: ResponsesFormat) -> None:
        renewing = asyncio.create_task(self._renew(owner, before, form.body))
        try:
            await self._service.run(job)
        except asyncio.CancelledError:
            form.failed(_CANCELLED)
        except ApiError as error:
            form.failed(error)
        except Exception:
            # The border of a task: a bug of ours must not leave the response in progress for ever.
            logger.exception("background response %s failed", job.request_id)
            form.failed(ApiError(500, "internal_error", "this server failed; its log says why"))
        finally:
            renewing.cancel()

    async def _renew(self, owner: str, before: Before, body: dict[str, Any]) -> None:
        while True:
            await asyncio.sleep(_RENEWED_S)
            self._history.put("response", owner, body["id"], _running(before, body))

    async def _before(self, asked: ResponsesRequest, owner: str) -> Before:
        conversation = asked.conversation_id
        if conversation is not None:
            await self._record("conversation", owner, conversation, "conversation")
            earlier = [json.loads(body) for _, body in await self._history.list(_items_of(conversation), owner)]
        else:
            earlier = await self._chain(asked.previous_response_id, owner)
        if asked.input is None and not earlier:
            raise invalid("input", "missing_required_parameter", "input is required")
        return Before(earlier, input_items(asked.input, "input") if asked.input is not None else [])

    async def _chain(self, response_id: str | None, owner: str) -> list[Item]:
        """Input and output of a response and of all before it, oldest first."""
        turns: list[list[Item]] = []
        while response_id is not None and len(turns) < _MAX_CHAIN:
            record = await self._response(owner, response_id, "previous_response_id")
            if record["response"]["status"] in _RUNNING:
                message = f"the response {response_id!r} is not finished"
                raise invalid("previous_response_id", "response_not_finished", message)
            turns.append([*record["input"], *record["response"]["output"]])
            response_id = record["response"]["previous_response_id"]
        return [item for turn in reversed(turns) for item in turn]

    def _store(self, owner: str, asked: ResponsesRequest, before: Before, body: dict[str, Any]) -> None:
        if asked.store is not False:
            record = {"response": body, "input": before.new}
            self._history.put("response", owner, body["id"], encode_json(record))
        conversation = asked.conversation_id
        if conversation is not None and body["status"] in ("completed", "incomplete"):
            for item in (*before.new, *body["output"]):
                self._history.put(_items_of(conversation), owner, item["id"], encode_json(item))

    async def _get(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false").lower() not in ("false", "0", ""):
            raise invalid("stream", "unsupported_parameter", "a stored response is fetched whole, not streamed")
        record = await self._response(self._owner(request), request.match_info["id"], None)
        return _json(record["response"])

    async def _delete(self, request: web.Request) -> web.Response:
        owner, response_id = self._owner(request), request.match_info["id"]
        await self._response(owner, response_id, None)  # nobody ends what is not theirs
        await self._stop_anywhere(response_id)
        if not await self._history.delete("response", owner, response_id):
            raise _unknown("response", response_id, None)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: web.Request) -> web.Response:
        owner, response_id = self._owner(request), request.match_info["id"]
        record = await self._response(owner, response_id, None)
        if not record["response"]["background"]:
            raise ApiError(400, "invalid_value", "only a background response can be cancelled", "id")
        await self._stop_anywhere(response_id)
        return _json((await self._response(owner, response_id, None))["response"])

    async def _stop_anywhere(self, response_id: str) -> None:
        if response_id not in self._running and self._service.stop_elsewhere is not None:
            await self._service.stop_elsewhere(response_id)
        await self.stop(response_id)

    async def stop(self, response_id: str) -> None:
        """End a background response, if it runs in this process; it is stored as cancelled then."""
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            await self._history.settle()  # another process may look next

    async def _input_items(self, request: web.Request) -> web.Response:
        record = await self._response(self._owner(request), request.match_info["id"], None)
        return _json(_page(request, record["input"], newest_first=True))

    # ---- conversations -----------------------------------------------------------------------------------------

    async def _create_conversation(self, request: web.Request) -> web.Response:
        owner = self._owner(request)
        asked, _ = await parse_body(await read_body(request) or b"{}", ConversationBody)
        conversation = new_id("conv")
        body = {
            "id": conversation,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": asked.metadata or {},
        }
        items = input_items(asked.items, "items") if asked.items else []
        await self._history.write("conversation", owner, conversation, encode_json(body))
        await self._write_items(owner, conversation, items)
        return _json(body)

    async def _get_conversation(self, request: web.Request) -> web.Response:
        return _json(await self._record("conversation", self._owner(request), request.match_info["id"], None))

    async def _update_conversation(self, request: web.Request) -> web.Response:
        owner, conversation = self._owner(request), request.match_info["id"]
        asked, _ = await parse_body(await read_body(request), ConversationBody)
        body = await self._record("conversation", owner, conversation, None)
        body["metadata"] = asked.metadata or {}
        await self._history.write("conversation", owner, conversation, encode_json(body))
        return _json(body)

    async def _delete_conversation(self, request: web.Request) -> web.Response:
        owner, conversation = self._owner(request), request.match_info["id"]
        if not await self._history.delete("conversation", owner, conversation):
            raise _unknown("conversation", conversation, None)
        for item_id, _ in await self._history.list(_items_of(conversation), owner):
            await self._history.delete(_items_of(conversation), owner, item_id)
        return _json({"id": conversation, "object": "conversation.deleted", "deleted": True})

    async def _add_items(self, request: web.Request) -> web.Response:
        owner, conversation = self._owner(request), request.match_info["id"]
        asked, _ = await parse_body(await read_body(request), ItemsBody)
        await self._record("conversation", owner, conversation, None)
        items = input_items(asked.items, "items")
        await self._write_items(owner, conversation, items)
        return _json(_list_object(items, False))

    async def _list_items(self, request: web.Request) -> web.Response:
        owner, conversation = self._owner(request), request.match_info["id"]
        await self._record("conversation", owner, conversation, None)
        stored = await self._history.list(_items_of(conversation), owner)
        return _json(_page(request, [json.loads(body) for _, body in stored], newest_first=True))

    async def _get_item(self, request: web.Request) -> web.Response:
        owner, conversation = self._owner(request), request.match_info["id"]
        return _json(await self._record(_items_of(conversation), owner, request.match_info["item"], None))

    async def _delete_item(self, request: web.Request) -> web.Response:
        owner, conversation, item = self._owner(request), request.match_info["id"], request.match_info["item"]
        body = await self._record("conversation", owner, conversation, None)
        if not await self._history.delete(_items_of(conversation), owner, item):
            raise _unknown("item", item, None)
        return _json(body)

    # ---- records -----------------------------------------------------------------------------------------------

    async def _write_items(self, owner: str, conversation: str, items: Sequence[Item]) -> None:
        for item in items:
            await self._history.write(_items_of(conversation), owner, item["id"], encode_json(item))

    async def _response(self, owner: str, response_id: str, param: str | None) -> dict[str, Any]:
        """The record of a response. One that ran in the background of a process that is gone has failed."""
        record = await self._record("response", owner, response_id, param)
        body, until_s = record["response"], record.get("runs_until_s", math.inf)
        if body["status"] in _RUNNING and response_id not in self._running and time.time() > until_s:
            body |= {"status": "failed", "error": {"code": _LOST.code, "message": _LOST.message}}
        return record

    async def _record(self, kind: str, owner: str, record_id: str, param: str | None) -> dict[str, Any]:
        body = await self._history.get(kind, owner, record_id)
        if body is None:
            raise _unknown(kind.partition(":")[0], record_id, param)
        return json.loads(body)

    def _owner(self, request: web.Request) -> str:
        self._keys.check(request.headers)
        key = presented_key(request.headers)
        return hashlib.sha256(key).hexdigest()[:32] if key and self._keys.required else ""


def _running(before: Before, body: dict[str, Any]) -> bytes:
    """The record of a response that runs, with the time until which it is believed to."""
    return encode_json({"response": body, "input": before.new, "runs_until_s": time.time() + _BELIEVED_S})


def _items_of(conversation: str) -> str:
    return f"item:{conversation}"


def _unknown(kind: str, record_id: str, param: str | None) -> ApiError:
    return ApiError(404, f"{kind}_not_found", f"there is no {kind} {record_id!r}", param)


def _page(request: web.Request, items: Sequence[Item], newest_first: bool) -> dict[str, Any]:
    """A page by `order`, `after` and `limit`. Raises `ApiError` 400."""
    query: Mapping[str, str] = request.query
    limit, order = query.get("limit", str(_PAGE)), query.get("order", "desc" if newest_first else "asc")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= _LARGEST_PAGE:
        raise invalid("limit", "invalid_value", f"limit must be in [1, {_LARGEST_PAGE}]")
    if order not in ("asc", "desc"):
        raise invalid("order", "invalid_value", "order must be asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid("after", "invalid_value", f"there is no item {after!r}")
        ordered = ordered[places[0] + 1 :]
    return _list_object(ordered[: int(limit)], len(ordered) > int(limit))


def _list_object(items: Sequence[Item], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def _json(value: object) -> web.Response:
    return web.Response(body=encode_json(value), content_type="application/json")
