# SPDX-License-Identifier: MIT
"""The engine's own HTTP ports, in every mode: what operators see of it and do to it without a gateway.

Made by `core` once the engine is warm, closed with it. `/metrics` is answered on the endpoint's threads from numbers
that the loop leaves there; the loop is never asked. Control calls wait for the loop's next turn.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from tokenspeed.config.control_paths import LARGE_PATHS, QUERY_PATHS
from tokenspeed.config.flags import FlagError
from tokenspeed.config.operations import OperationsConfig
from tokenspeed.engine.control_routes import control_routes
from tokenspeed.engine.replica_operations import AnyOperations
from tokenspeed.observability.endpoint import Answer, Endpoint, Paths, Routes
from tokenspeed.observability.engine_metrics import CONTENT_TYPE

logger = logging.getLogger("tokenspeed.engine")

_PATHS = Paths(open=frozenset({"/metrics", "/health"}), large=LARGE_PATHS, queried=QUERY_PATHS)


class MetricsText(Protocol):
    def render(self) -> bytes: ...


class EnginePorts:
    """info: facts for /get_server_info. Raises FlagError for a port that cannot be had."""

    def __init__(
        self, config: OperationsConfig, metrics: MetricsText, operations: AnyOperations, info: Mapping[str, Any]
    ) -> None:
        self._operations = operations
        self._metrics: Endpoint | None = None
        self._control: Endpoint | None = None
        scraped: Routes = {("GET", "/metrics"): lambda _: Answer(200, CONTENT_TYPE, metrics.render())}
        if config.metrics_port is not None:
            self._metrics = _listen("--metrics-port", config.metrics_host, config.metrics_port, scraped, None)
            logger.info("metrics at http://%s:%d/metrics", config.metrics_host, self._metrics.port)
        if config.control_port is not None:
            routes = {**control_routes(operations, lambda: info), **scraped}
            try:
                key = config.control_key
                self._control = _listen("--rl-control-port", config.control_host, config.control_port, routes, key)
            except FlagError:
                self.close()
                raise
            logger.info("control at http://%s:%d", config.control_host, self._control.port)

    @property
    def metrics_port(self) -> int | None:
        return None if self._metrics is None else self._metrics.port

    @property
    def control_port(self) -> int | None:
        return None if self._control is None else self._control.port

    def close(self) -> None:
        self._operations.close()
        for endpoint in (self._metrics, self._control):
            if endpoint is not None:
                endpoint.close()
        self._metrics = self._control = None


def _listen(flag: str, host: str, port: int, routes: Routes, key: str | None) -> Endpoint:
    try:
        return Endpoint(host, port, routes, key, _PATHS)
    except OSError as error:
        raise FlagError(flag, f"{host}:{port}: {error.strerror or error}") from None
