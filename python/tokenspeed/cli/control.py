# SPDX-License-Identifier: MIT
"""The supervisor's control server (`--control-port`): what runs here, the gateway's health, and the engine's controls.

On loopback only, on threads of its own. What steers or measures the engine is passed on to the engine's own port and
answered by it; while there is no engine the answer is 503. Requests for text go on to the gateway, so that a trainer
needs one address. What this release lacks is answered 501 with the reason.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenspeed.cli.replies import merged
from tokenspeed.config.control_paths import ABSENT_PATHS, ENGINE_PATHS, GATEWAY_PATHS, LARGE_PATHS, QUERY_PATHS
from tokenspeed.observability.endpoint import Answer, Endpoint, Handler, Paths, json_answer, refusal
from tokenspeed.observability.pass_on import PassOn

_ONE_TOKEN = b'{"text": "1", "sampling_params": {"max_new_tokens": 1}}'
_JOIN = "/init_weights_update_group"
_TIMEOUT_S = 5.0
_RELAY_TIMEOUT_S = 3600.0
"""A pause waits for the requests that run; new weights may come from a slow disk."""

Info = Callable[[], Mapping[str, Any]]


class ControlServer:
    """Listens from construction to `close`. `engine_urls`: of every replica; all are asked, and answer as one.
    `info`: what /get_server_info tells beside the engine's own facts. `api_key`: what callers must present and what
    the engine asks for; None for nothing. `gateway_key`: what the gateway asks for; who has presented our key need not
    know it. Raises OSError for a taken port."""

    def __init__(
        self,
        port: int,
        gateway_url: str,
        engine_urls: Sequence[str],
        api_key: str | None,
        gateway_key: str | None,
        info: Info,
    ) -> None:
        routes: dict[tuple[str, str], Handler] = {
            (method, path): _absent(path, why) for method in ("GET", "POST") for path, why in ABSENT_PATHS.items()
        }
        for method in ("GET", "POST"):
            for path in ENGINE_PATHS:
                routes[method, path] = _relay_to_all(method, path, engine_urls, api_key)
        routes["POST", _JOIN] = _join_all(engine_urls, api_key)
        routes["GET", "/health"] = lambda _: _gateway_health(gateway_url)
        routes["GET", "/get_server_info"] = _server_info(
            info, _relay_to_all("GET", "/get_server_info", engine_urls, api_key)
        )
        routes["GET", "/health_generate"] = lambda _: json_answer(200, {"status": "ok"})
        routes["GET", "/metrics"] = _relay_to_all("GET", "/metrics", engine_urls, None)
        passed_on = {path: PassOn(gateway_url, key=gateway_key) for path in GATEWAY_PATHS}
        passed_on["/health_check"] = PassOn(gateway_url, "/generate", _ONE_TOKEN, gateway_key)
        paths = Paths(frozenset({"/health", "/metrics"}), LARGE_PATHS | {*GATEWAY_PATHS}, QUERY_PATHS, passed_on)
        self._endpoint = Endpoint("127.0.0.1", port, routes, api_key, paths)
        self.port = self._endpoint.port

    def close(self) -> None:
        self._endpoint.close()


def _absent(path: str, why: str) -> Handler:
    return lambda _: refusal(501, f"{path}: {why}")


def _relay_to_all(method: str, path: str, urls: Sequence[str], api_key: str | None) -> Handler:
    """Every replica is asked, at the same time: a pause waits for the requests of all."""
    relays = [_relay(method, f"{url}{path}", api_key) for url in urls]
    if len(relays) == 1:
        return relays[0]

    def handler(body: Mapping[str, Any]) -> Answer:
        with ThreadPoolExecutor(len(relays)) as threads:
            return merged(list(threads.map(lambda relay: relay(body), relays)))

    return handler


def _server_info(info: Info, engine: Handler) -> Handler:
    """What was asked for, and in its place what has come of it, as far as there is an engine to say so."""

    def handler(body: Mapping[str, Any]) -> Answer:
        answer = engine(body)
        told = json.loads(answer.data) if answer.status == 200 else {}
        told.pop("data_parallel_rank", None)  # of one replica
        return json_answer(200, {**info(), **told})

    return handler


def _join_all(urls: Sequence[str], api_key: str | None) -> Handler:
    """Each replica's ranks in a trainer's group follow those of the replica before."""
    relays = [_relay("POST", f"{url}{_JOIN}", api_key) for url in urls]
    ask = _relay("GET", f"{urls[0]}/get_server_info", api_key)

    def handler(body: Mapping[str, Any]) -> Answer:
        offset = body.get("rank_offset")
        if len(relays) == 1 or type(offset) is not int:
            return relays[0](body)
        info = ask({})
        if info.status != 200:
            return info
        num_ranks = json.loads(info.data)["tensor_parallel_size"]
        bodies = [{**body, "rank_offset": offset + index * num_ranks} for index in range(len(relays))]
        with ThreadPoolExecutor(len(relays)) as threads:
            return merged(list(threads.map(lambda relay, own: relay(own), relays, bodies)))

    return handler


def _relay(method: str, url: str, api_key: str | None) -> Handler:
    """What the engine answers; 503 while there is none."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"

    def handler(body: Mapping[str, Any]) -> Answer:
        data = None if method == "GET" else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_RELAY_TIMEOUT_S) as response:
                return Answer(int(response.status), response.headers["content-type"], response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers["content-type"], error.read())
        except OSError as error:
            return refusal(503, f"the engine does not answer: {_reason(error)}")

    return handler


def _gateway_health(url: str) -> Answer:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_TIMEOUT_S) as response:
            return json_answer(int(response.status), {"status": "ok"})
    except urllib.error.HTTPError as error:
        return json_answer(error.code, {"status": "unhealthy"})
    except OSError as error:
        return json_answer(503, {"status": "unreachable", "message": _reason(error)})


def _reason(error: OSError) -> str:
    """In the words of the system: urllib wraps what went wrong."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(cause)
