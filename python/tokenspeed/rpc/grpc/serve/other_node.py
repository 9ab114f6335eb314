# SPDX-License-Identifier: MIT
"""The same command on a machine with another `--node-rank` than 0: ranks alone, and a health check in place of gRPC.

No gateway is given this address; `GET /health` there is for whoever supervises the machines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenspeed.config import hardware
from tokenspeed.config.flags import FlagError, json_object, values_from_kwargs
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import resolve_model
from tokenspeed.config.resolve import resolve
from tokenspeed.engine.nodes import Node
from tokenspeed.observability.endpoint import Answer, Endpoint, json_answer

logger = logging.getLogger("tokenspeed.engine")


def run_other_node(options: Mapping[str, Any], host: str, port: int) -> int:
    """options: the engine's flags that were given, by keyword. The exit status. Raises FlagError and ModelError."""
    values = values_from_kwargs(options, ENGINE_FLAGS).values
    source = resolve_model(values["model"], revision=values["revision"], download_dir=values["download_dir"])
    model_config = load_model_config(source, json_object(values, "hf_overrides"))
    config = resolve(values, hardware.detect(), model_config)
    if config.parallel.data_rank is None:
        raise FlagError("--node-rank", "replicas on several machines are started by `ts serve`")
    node = Node(config, source, model_config)

    def health(_: Mapping[str, Any]) -> Answer:
        if node.is_joined:
            return json_answer(200, {"status": "ok"})
        return json_answer(503, {"status": "unhealthy", "message": "the first rank has not been reached"})

    try:
        endpoint = Endpoint(host, port, {("GET", "/health"): health})
    except OSError as error:
        raise FlagError("--port", f"{host}:{port}: {error.strerror}") from None
    logger.info("ranks of another machine's engine; health at http://%s:%d/health", host, endpoint.port)
    try:
        return node.run()
    finally:
        endpoint.close()
