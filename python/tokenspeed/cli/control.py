# SPDX-License-Identifier: MIT
"""The supervisor's control server (`--control-port`): what runs here, the gateway's health, the engine's metrics.

On loopback only, on threads of its own; it reads and never changes anything. The endpoints by which trainers steer an
engine are known by name and answered 501, so that a client learns what this release lacks instead of guessing.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed.observability.endpoint import Answer, Endpoint, Handler, json_answer, refusal

_ABSENT = (
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
)
_TIMEOUT_S = 5.0

Info = Callable[[], Mapping[str, Any]]


class ControlServer:
    """Listens from construction to `close`. `info`: what /get_server_info tells. Raises OSError for a taken port."""

    def __init__(self, port: int, gateway_url: str, engine_url: str, info: Info) -> None:
        routes: dict[tuple[str, str], Handler] = {
            (method, path): _absent(path) for method in ("GET", "POST") for path in _ABSENT
        }
        routes["GET", "/health"] = lambda _: _gateway_health(gateway_url)
        routes["GET", "/get_server_info"] = lambda _: json_answer(200, info())
        routes["GET", "/health_generate"] = lambda _: json_answer(200, {"status": "ok"})
        routes["GET", "/metrics"] = lambda _: _relayed(f"{engine_url}/metrics")
        self._endpoint = Endpoint("127.0.0.1", port, routes)
        self.port = self._endpoint.port

    def close(self) -> None:
        self._endpoint.close()


def _absent(path: str) -> Handler:
    return lambda _: refusal(501, f"{path}: this release does not have it")


def _relayed(url: str) -> Answer:
    """What the engine answers; 503 while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            return Answer(int(response.status), response.headers["content-type"], response.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers["content-type"], error.read())
    except OSError as error:
        return refusal(503, f"the engine does not answer: {error}")


def _gateway_health(url: str) -> Answer:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_TIMEOUT_S) as response:
            return json_answer(int(response.status), {"status": "ok"})
    except urllib.error.HTTPError as error:
        return json_answer(error.code, {"status": "unhealthy"})
    except OSError as error:
        return json_answer(503, {"status": "unreachable", "message": str(error)})
