# SPDX-License-Identifier: MIT
"""A request of a small HTTP server that another server answers: its bytes go on, the answer comes back as it is made.

Runs on the connection's thread. A stream is handed on piece by piece; a caller who leaves ends it at the other server
too.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

_PIECE_BYTES = 8192
_TIMEOUT_S = 3600.0
_KEPT = ("Content-Type", "Accept", "traceparent", "X-Request-Id")


@dataclass(frozen=True)
class PassOn:
    """url: of the other server. target, body: a POST of these in place of what the caller sent. key: what the other
    server asks for, where callers present another one here."""

    url: str
    target: str | None = None
    body: bytes = b""
    key: str | None = None


class Unanswered(Exception):
    """The other server does not answer."""


def pass_on(caller: BaseHTTPRequestHandler, to: PassOn, body: bytes, authorized_there: bool) -> None:
    """authorized_there: the caller's Authorization is meant for the other server. Raises Unanswered, and nothing has
    been written then; OSError or HTTPException when one of the two goes amid the answer."""
    headers = {name: value for name in _KEPT if (value := caller.headers.get(name)) is not None}
    if authorized_there and "Authorization" in caller.headers:
        headers["Authorization"] = caller.headers["Authorization"]
    elif not authorized_there and to.key is not None:
        headers["Authorization"] = f"Bearer {to.key}"
    connection = _connection(to.url)
    try:
        try:
            if to.target is None:
                connection.request(caller.command, caller.path, body or None, headers)
            else:
                connection.request("POST", to.target, to.body, headers | {"Content-Type": "application/json"})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(str(error)) from None
        _hand_back(caller, answer)
    finally:
        connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # our own child, at an address of our own
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)


def _hand_back(caller: BaseHTTPRequestHandler, answer: http.client.HTTPResponse) -> None:
    length = answer.getheader("Content-Length")
    caller.send_response(answer.status)
    for name, value in answer.getheaders():
        if name.lower() in ("content-type", "retry-after", "x-request-id", "cache-control"):
            caller.send_header(name, value)
    caller.send_header(*(("Transfer-Encoding", "chunked") if length is None else ("Content-Length", length)))
    caller.end_headers()
    num_bytes = 0
    for piece in _pieces(answer):
        num_bytes += len(piece)
        caller.wfile.write(piece if length is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
    if length is None:
        caller.wfile.write(b"0\r\n\r\n")
    elif num_bytes < int(length):
        raise http.client.IncompleteRead(b"", int(length) - num_bytes)


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := answer.read1(_PIECE_BYTES):
        yield piece
