# SPDX-License-Identifier: MIT
"""A small HTTP server on threads of its own: what an engine and the supervisor show beside their work.

The engine's `/metrics` and control port and the supervisor's control port are made of it. Handlers run on a thread a
connection, so they may wait (for the engine's loop, for a child); they never run on the thread that started the
server, and a fault of one is a 500 of that request. With a key, every path but the open ones asks for it as a bearer
token. It is no gateway: bodies are small JSON objects, but on the paths that are said to take large ones, from
callers with the key.
"""

from __future__ import annotations

import hmac
import http.client
import http.server
import json
import logging
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tokenspeed.observability.pass_on import PassOn, Unanswered, pass_on

logger = logging.getLogger(__name__)

JSON = "application/json"
_MAX_BODY_BYTES = 1 << 20
_MAX_LARGE_BODY_BYTES = 1 << 31
_JOIN_S = 5.0


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    data: bytes


Handler = Callable[[Mapping[str, Any]], Answer]
"""Takes the body, a JSON object; {} when there is none."""

Routes = Mapping[tuple[str, str], Handler]
"""By (method, path)."""


@dataclass(frozen=True)
class Paths:
    """open: free of the key. large: with bodies of up to 2 GiB instead of 1 MiB. queried: fields may also come in the
    URL's query: texts, and lists of those that come several times. passed_on: answered by another server."""

    open: frozenset[str] = frozenset()
    large: frozenset[str] = frozenset()
    queried: frozenset[str] = frozenset()
    passed_on: Mapping[str, PassOn] = field(default_factory=dict)


NO_PATHS = Paths()


def json_answer(status: int, body: Mapping[str, Any]) -> Answer:
    return Answer(status, JSON, json.dumps(body).encode())


def refusal(status: int, message: str) -> Answer:
    """What went wrong, in the shape that clients of control endpoints read."""
    return json_answer(status, {"success": False, "message": message})


class Endpoint:
    """Listens from construction to `close`. port 0: a free one, see `port`. Raises OSError for a taken port.

    api_key: what callers must present, None for nothing.
    """

    def __init__(
        self, host: str, port: int, routes: Routes, api_key: str | None = None, paths: Paths = NO_PATHS
    ) -> None:
        class Bound(_Handler):
            pass

        Bound.routes, Bound.paths = routes, paths
        Bound.key = None if api_key is None else api_key.encode()
        self._server = http.server.ThreadingHTTPServer((host, port), Bound)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # of an idle connection
    routes: ClassVar[Routes]
    key: ClassVar[bytes | None]
    paths: ClassVar[Paths]

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = self.path.partition("?")[0]
        answer = self._passed_on(path, self.paths.passed_on[path]) if path in self.paths.passed_on else self._answer()
        if answer is None:
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.data)))
        self.end_headers()
        self.wfile.write(answer.data)

    def _passed_on(self, path: str, to: PassOn) -> Answer | None:
        """None once the other server's answer was handed on."""
        may = self._authorized()
        data = self._data(_MAX_LARGE_BODY_BYTES if may and path in self.paths.large else _MAX_BODY_BYTES)
        if not may:
            return refusal(401, "a valid key is required: Authorization: Bearer <key>")
        if isinstance(data, Answer):
            return data
        try:
            # With a key of our own, the one that came is not the other server's.
            pass_on(self, to, data, self.key is None)
        except Unanswered as error:
            return refusal(503, f"{path}: {to.url} does not answer: {error}")
        except (OSError, http.client.HTTPException):  # the caller has left, or the other server amid its answer
            self.close_connection = True
        return None

    def _answer(self) -> Answer:
        path, _, query = self.path.partition("?")
        may = self._authorized()
        large = may and path in self.paths.large
        # Read in any case: the connection goes on.
        body = self._body(_MAX_LARGE_BODY_BYTES if large else _MAX_BODY_BYTES)
        if not may and path not in self.paths.open:
            return refusal(401, "a valid key is required: Authorization: Bearer <key>")
        if isinstance(body, Answer):
            return body
        if path in self.paths.queried:
            found = urllib.parse.parse_qs(query, keep_blank_values=True)
            body = {name: values if len(values) > 1 else values[0] for name, values in found.items()} | dict(body)
        handler = self.routes.get((self.command, path))
        if handler is None:
            allowed = sorted(method for method, known in self.routes if known == path)
            if allowed:
                return refusal(405, f"{path} takes {', '.join(allowed)}")
            return refusal(404, f"{path}: no such endpoint")
        try:
            return handler(body)
        except Exception:
            # The border: a bug behind one path must not end the connection without a word.
            logger.exception("%s %s failed", self.command, path)
            return refusal(500, f"{path}: this server failed; its log says why")

    def _authorized(self) -> bool:
        if self.key is None:
            return True
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.key)

    def _data(self, limit: int) -> bytes | Answer:
        length = self.headers.get("Content-Length") or "0"
        if not length.isdigit() or int(length) > limit:
            self.close_connection = True
            return refusal(413, f"a body has at most {limit} bytes")
        return self.rfile.read(int(length))

    def _body(self, limit: int) -> Mapping[str, Any] | Answer:
        data = self._data(limit)
        if isinstance(data, Answer):
            return data
        if not data.strip():
            return {}
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        return body if isinstance(body, dict) else refusal(400, "the body must be a JSON object")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: these ports are polled."""
