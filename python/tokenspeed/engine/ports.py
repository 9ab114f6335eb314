# SPDX-License-Identifier: MIT
"""The engine's own HTTP ports, in every mode: what operators see of it without a gateway.

Made by `core` once the engine is warm, closed with it. Requests are answered on the endpoint's threads from numbers
that the loop leaves in the metrics; the loop is never asked and never waits.
"""

from __future__ import annotations

import logging

from tokenspeed.config.flags import FlagError
from tokenspeed.config.resolve import OperationsConfig
from tokenspeed.observability.endpoint import Answer, Endpoint, Routes
from tokenspeed.observability.engine_metrics import CONTENT_TYPE, EngineMetrics

logger = logging.getLogger("tokenspeed.engine")


class EnginePorts:
    """Raises FlagError for a port that cannot be had."""

    def __init__(self, config: OperationsConfig, metrics: EngineMetrics) -> None:
        self._metrics: Endpoint | None = None
        if config.metrics_port is not None:
            routes = {("GET", "/metrics"): lambda _: Answer(200, CONTENT_TYPE, metrics.render())}
            self._metrics = _listen("--metrics-port", config.metrics_host, config.metrics_port, routes)
            logger.info("metrics at http://%s:%d/metrics", config.metrics_host, self._metrics.port)

    @property
    def metrics_port(self) -> int | None:
        return None if self._metrics is None else self._metrics.port

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _listen(flag: str, host: str, port: int, routes: Routes) -> Endpoint:
    try:
        return Endpoint(host, port, routes)
    except OSError as error:
        raise FlagError(flag, f"{host}:{port}: {error.strerror or error}") from None
