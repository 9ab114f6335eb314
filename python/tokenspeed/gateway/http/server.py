# SPDX-License-Identifier: MIT
"""The HTTP surface: routes, request ids, errors as JSON, health. Handlers are thin; the work is in `Service`.

Every answer carries `x-request-id`. `/liveness` says that this process runs, `/readiness` whether it takes requests
(503 from the first moment of a shutdown), `/health` whether the engine behind it is there and makes progress.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from tokenspeed.gateway.chat.chat_request import chat_job
from tokenspeed.gateway.chat.completion_request import completion_job
from tokenspeed.gateway.chat.fields import parse_body
from tokenspeed.gateway.chat.format import encode_json
from tokenspeed.gateway.chat.generate_request import generate_job
from tokenspeed.gateway.chat.messages_format import messages_error
from tokenspeed.gateway.chat.messages_request import count_tokens, messages_job
from tokenspeed.gateway.chat.parse_request import parse_calls, parse_reasoning
from tokenspeed.gateway.http.auth import KeyCheck
from tokenspeed.gateway.http.body import STALL_S, read_body
from tokenspeed.gateway.http.connections import Connections
from tokenspeed.gateway.http.cors import allow_origins
from tokenspeed.gateway.http.errors import ApiError, invalid
from tokenspeed.gateway.http.logs import log_access
from tokenspeed.gateway.http.page import page_route
from tokenspeed.gateway.http.protocol import expecting
from tokenspeed.gateway.http.request_ids import new_id
from tokenspeed.gateway.http.service import ROUTED, MakeJob, Service
from tokenspeed.gateway.route.worker import WorkerState
from tokenspeed.observability.gateway_metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
_MAX_ID_LENGTH = 256
_JSON = "application/json"
_MAX_CHARACTERS, _MAX_TOKENS = 4_194_304, 1_048_576
"""What is tokenized, and turned back into text, at once: some seconds of work in a thread of its own."""
_MAX_LOGGED = 256
"""Characters of what a client wrote."""
_REQUEST_ID = web.RequestKey("request_id", str)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/tokenize`."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/detokenize`."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


@dataclass(frozen=True)
class HttpOptions:
    """What requests may be like. stall_s: 0 for no limit."""

    max_body_bytes: int
    id_headers: Sequence[str]
    stall_s: float
    cors_origins: Sequence[str]
    connections: Connections
    access_fields: Sequence[str] = ()
    """Told of every request in a log line; none: requests have no lines."""


class Server:
    """Routes of one gateway. `app` is ready to be run; it owns nothing that has to be closed."""

    def __init__(
        self,
        service: Service,
        keys: KeyCheck,
        options: HttpOptions,
        more_routes: Sequence[web.RouteDef],
    ) -> None:
        """more_routes: of APIs that have handlers of their own."""
        self._service = service
        self._keys = keys
        self._id_headers = (*options.id_headers, *_ID_HEADERS)
        self._connections = options.connections
        self._options = options
        self._started_s = int(time.time())
        self.app = web.Application(client_max_size=options.max_body_bytes, middlewares=[self._middleware])
        self.app[STALL_S] = options.stall_s or math.inf
        allow_origins(self.app, options.cors_origins)
        self.app.add_routes(
            expecting(
                [
                    web.post("/v1/chat/completions", self._generation(chat_job)),
                    web.post("/v1/completions", self._generation(completion_job)),
                    web.post("/v1/messages", self._generation(messages_job)),
                    web.post("/v1/messages/count_tokens", self._count_tokens),
                    web.post("/generate", self._generation(generate_job)),
                    web.post("/parse/function_call", self._parse_calls),
                    web.post("/parse/reasoning", self._parse_reasoning),
                    web.get("/v1/models", self._models),
                    web.get("/v1/models/{id:.+}", self._model),
                    web.post("/v1/tokenize", self._tokenize),
                    web.post("/v1/detokenize", self._detokenize),
                    *self._probes(),
                    web.get("/metrics", self._metrics),
                    page_route(),
                    *more_routes,
                ]
            )
        )

    def _probes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/liveness", self._liveness),
            web.get("/readiness", self._readiness),
        ]

    def side_app(self, routes: Sequence[web.RouteDef]) -> web.Application:
        """Probes and `routes`, for a port of their own."""
        app = web.Application(client_max_size=self._options.max_body_bytes, middlewares=[self._middleware])
        app.add_routes(expecting([*self._probes(), *routes]))
        return app

    # ---- every request -----------------------------------------------------------------------------------------

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        begun_s = time.monotonic()
        request_id = self._request_id(request)
        request[_REQUEST_ID] = request_id
        metrics = self._service.metrics
        transport = request.transport
        self._connections.begun(transport)
        status, code = 499, "client_closed_request"  # unless an answer comes about
        response: web.StreamResponse | None = None
        try:
            response = await self._guarded(request, handler)
            status, code = response.status, response.headers.get("x-smg-error-code", "")
            if not response.prepared:
                response.headers["x-request-id"] = request_id
            return response
        except web.HTTPException as error:
            status, code = error.status, ""
            raise
        finally:
            self._connections.ended(transport)
            resource = request.match_info.route.resource
            pattern = resource.canonical if resource is not None else "other"
            duration_s = time.monotonic() - begun_s
            metrics.http_finished(request.method, pattern, status, code, duration_s)
            if self._options.access_fields:
                self._log(request, response, status, duration_s)

    def _log(self, request: web.Request, response: web.StreamResponse | None, status: int, duration_s: float) -> None:
        """A line of a request. response: None for one that has none."""
        facts: dict[str, object] = {
            "request_id": request[_REQUEST_ID],
            "method": request.method,
            "path": request.path[:_MAX_LOGGED],
            "status": status,
            "duration_ms": round(1000 * duration_s, 3),
        }
        known: dict[str, Callable[[], object]] = {
            "client_addr": lambda: request.remote,
            "forwarded_for": lambda: request.headers.get("x-forwarded-for", "")[:_MAX_LOGGED],
            "user_agent": lambda: request.headers.get("user-agent", "")[:_MAX_LOGGED],
            "request_bytes": lambda: request.content.total_bytes,
            "response_bytes": lambda: _num_bytes(response),
            "worker": lambda: request.get(ROUTED, ""),
        }
        log_access(facts | {name: known[name]() for name in self._options.access_fields})

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or the error it raised as an answer."""
        try:
            return await handler(request)
        except ApiError as error:
            return _error_response(error, request.path)
        except web.HTTPRequestEntityTooLarge as error:
            too_large = ApiError(413, "request_too_large", f"the body is too large: {error.text}")
            return _error_response(too_large, request.path)
        except web.RequestPayloadError as error:
            return _unreadable(error, request)
        except web.HTTPNotFound:
            unknown = ApiError(404, "unknown_url", f"no such endpoint: {request.method} {request.path}")
            return _error_response(unknown, request.path)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            wrong_method = ApiError(405, "method_not_allowed", f"{request.path} takes {allowed}")
            response = _error_response(wrong_method, request.path)
            response.headers["allow"] = allowed
            return response
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            # The border: one request's bug must not take the others with it, and it must not pass unseen.
            logger.exception("request %s failed", request[_REQUEST_ID])
            failed = ApiError(500, "internal_error", "this server failed; its log says why")
            return _error_response(failed, request.path)

    def _request_id(self, request: web.Request) -> str:
        for name in self._id_headers:
            given = request.headers.get(name)
            if given and len(given) <= _MAX_ID_LENGTH and given.isprintable():
                return given
        return new_id(32)

    def _generation(self, make_job: MakeJob) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            self._keys.check(request.headers)
            return await self._service.handle(request, request[_REQUEST_ID], make_job)

        return handler

    # ---- models and tokens -------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        data = [self._model_object()] if self._service.router.ready() else []
        return _json({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        self._service.model.check_name(request.match_info["id"])
        return _json(self._model_object())

    def _model_object(self) -> dict[str, object]:
        service = self._service
        limit = service.model.max_model_len if service.router.ready() else None
        return {
            "id": service.model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "tokenspeed",
            "max_model_len": limit,
        }

    async def _parse_calls(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        body = await parse_calls(await read_body(request), self._service.model)
        return web.Response(body=body, content_type=_JSON)

    async def _parse_reasoning(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        return web.Response(
            body=await parse_reasoning(await read_body(request), self._service.model), content_type=_JSON
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        asked, _ = await parse_body(await read_body(request), TokenizeRequest)
        model = self._service.model
        model.check_name(asked.model)
        if len(asked.prompt) > _MAX_CHARACTERS:
            raise _too_long("prompt", "string_above_max_length", f"{len(asked.prompt)} characters", _MAX_CHARACTERS)
        ids = await model.tokens(asked.prompt, "prompt", add_special_tokens=asked.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids)})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        return web.Response(body=await count_tokens(await read_body(request), self._service.model), content_type=_JSON)

    async def _detokenize(self, request: web.Request) -> web.Response:
        self._keys.check(request.headers)
        asked, _ = await parse_body(await read_body(request), DetokenizeRequest)
        model = self._service.model
        model.check_name(asked.model)
        if len(asked.tokens) > _MAX_TOKENS:
            raise _too_long("tokens", "array_above_max_length", f"{len(asked.tokens)} tokens", _MAX_TOKENS)
        if any(not 0 <= token < model.tokenizer.size for token in asked.tokens):
            raise invalid("tokens", "invalid_value", f"tokens must be in [0, {model.tokenizer.size})")
        return _json({"text": await model.text(asked.tokens, skip_special_tokens=asked.skip_special_tokens)})

    # ---- health ------------------------------------------------------------------------------------------------

    async def _liveness(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _health(self, request: web.Request) -> web.Response:
        states = {worker.url: worker.state() for worker in self._service.router.workers}
        healthy = WorkerState.READY in states.values()
        body = {
            "status": "ok" if healthy else "unhealthy",
            "workers": [
                {
                    "url": worker.url,
                    "state": states[worker.url].value,
                    "reason": worker.reason,
                    "in_flight": worker.num_in_flight,
                    "silence_s": round(worker.silence_s(), 3),
                }
                for worker in self._service.router.workers
            ],
        }
        return _json(body, 200 if healthy else 503)

    async def _readiness(self, request: web.Request) -> web.Response:
        service = self._service
        num_ready = sum(worker.state() is WorkerState.READY for worker in service.router.workers)
        ready = num_ready > 0 and not service.stopping
        if ready and service.others_ready is not None:
            ready = await service.others_ready()
        status = "ready" if ready else ("draining" if service.stopping else "not ready")
        body = {"status": status, "workers": len(service.router.workers), "workers_ready": num_ready}
        return _json(body, 200 if ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return await metrics_response(self._service)


async def metrics_response(service: Service) -> web.Response:
    """The text of /metrics, of all gateway processes on this port."""
    body = service.own_metrics() if service.totals is None else await service.totals()
    return web.Response(body=body, headers={"content-type": CONTENT_TYPE})


def _num_bytes(response: web.StreamResponse | None) -> int:
    """Of its body: a whole answer goes out behind the middleware."""
    if isinstance(response, web.Response):
        return len(response.body) if isinstance(response.body, bytes) else 0
    return 0 if response is None else response.body_length


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(value), status=status, content_type=_JSON)


def _too_long(param: str, code: str, has: str, limit: int) -> ApiError:
    return invalid(param, code, f"{param} has {has}, at most {limit}")


def _error_response(error: ApiError, path: str) -> web.Response:
    """An error in the shape that the clients of this path read."""
    body = messages_error(error) if path.startswith("/v1/messages") else error.body
    return web.Response(body=body, status=error.status, content_type=_JSON, headers=error.headers)


def _unreadable(error: web.RequestPayloadError, request: web.Request) -> web.Response:
    """A body that is not what its headers say. What is left of it cannot be read, so the connection ends with it."""
    request.content.feed_eof()
    detail = " ".join(str(error).split()).removeprefix("400, message: ")
    response = _error_response(invalid("body", "invalid_body", f"the body cannot be read: {detail}"), request.path)
    response.force_close()
    return response
