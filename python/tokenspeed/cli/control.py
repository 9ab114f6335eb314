# SPDX-License-Identifier: MIT
"""The supervisor's control server (`--control-port`): what runs here, and the gateway's health, on loopback only.

Its own thread; it reads and never changes anything. The endpoints by which trainers steer an engine are known by
name and answered 501, so that a client learns what this release lacks instead of guessing.
"""

from __future__ import annotations

import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

_ABSENT = frozenset(
    {
        "/abort",
        "/abort_request",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/flush_cache",
        "/generate",
        "/get_weight_version",
        "/init_weights_update_group",
        "/pause_generation",
        "/rebalance_experts",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/start_profile",
        "/stop_profile",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_mooncake",
        "/update_weights_from_tensor",
        "/v1/loads",
    }
)
_TIMEOUT_S = 5.0

Info = Callable[[], Mapping[str, Any]]


class ControlServer:
    """Listens from construction to `close`. `info`: what /get_server_info tells. Raises OSError for a taken port."""

    def __init__(self, port: int, gateway_url: str, info: Info) -> None:
        class Handler(_Handler):
            pass

        Handler.gateway_url, Handler.info = gateway_url, staticmethod(info)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_S)


class _Handler(http.server.BaseHTTPRequestHandler):
    gateway_url = ""
    info: Info

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self._answer(*_gateway_health(self.gateway_url))
        elif path == "/get_server_info":
            self._answer(200, type(self).info())
        elif path == "/health_generate":
            self._answer(200, {"status": "ok"})
        else:
            self._refuse(path)

    def do_POST(self) -> None:
        self._refuse(self.path.partition("?")[0])

    def _refuse(self, path: str) -> None:
        if path in _ABSENT:
            self._answer(501, {"success": False, "message": f"{path}: this release does not have it"})
        else:
            self._answer(404, {"success": False, "message": f"{path}: no such endpoint; {self.gateway_url} generates"})

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the supervisor's output is the children's."""


def _gateway_health(url: str) -> tuple[int, Mapping[str, Any]]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_TIMEOUT_S) as response:
            return int(response.status), {"status": "ok"}
    except urllib.error.HTTPError as error:
        return error.code, {"status": "unhealthy"}
    except OSError as error:
        return 503, {"status": "unreachable", "message": str(error)}
