# SPDX-License-Identifier: MIT
"""The tables that commands parse and documentation renders: the engine's flags, and the supervisor's own."""

from __future__ import annotations

from tokenspeed.config.flags import Flag
from tokenspeed.config.flags_honoured import HONOURED
from tokenspeed.config.flags_refused import REFUSED

_SUPERVISOR = "Supervisor"

ENGINE_FLAGS: tuple[Flag, ...] = HONOURED + REFUSED

_SERVER = "gRPC server"

SERVER_FLAGS: tuple[Flag, ...] = (
    Flag(("--host",), "str", "127.0.0.1", "Address that the gRPC server listens on.", _SERVER),
    Flag(("--port",), "int", 50051, "Its port; 0: a free one.", _SERVER),
    Flag(("--drain-timeout",), "float", 30.0, "Seconds that streams have to finish after SIGTERM.", _SERVER),
    Flag(("--reasoning-parser",), "str", None, "What gateways are told to take the model's reasoning for.", _SERVER),
)
"""Of `python3 -m tokenspeed.rpc.grpc`, beside the engine's."""

SUPERVISOR_FLAGS: tuple[Flag, ...] = (
    Flag(("--headless",), "switch", False, "An engine alone, which dials a gateway.", _SUPERVISOR),
    Flag(("--engine-startup-timeout",), "float", 3600.0, "Seconds until the engine must be ready.", _SUPERVISOR),
    Flag(("--gateway-startup-timeout",), "float", 60.0, "Seconds until the gateway must listen.", _SUPERVISOR),
    Flag(("--drain-timeout",), "float", 30.0, "Seconds that streams have to finish after SIGTERM.", _SUPERVISOR),
    Flag(
        ("--engine-restarts",),
        "int",
        3,
        "How often in a row an engine or gateway that died is started again; 0: the server ends with it.",
        _SUPERVISOR,
    ),
    Flag(
        ("--log-level-http",),
        "str",
        None,
        "Least severe line that the gateway logs (warn).",
        _SUPERVISOR,
        choices=("debug", "info", "warning", "warn", "error", "critical"),
    ),
    Flag(
        ("--control-port",),
        "int",
        None,
        "Loopback port of the control server: /get_server_info, /health, /metrics and the engine's control endpoints. "
        "When not given: the one behind --port, if it is free.",
        _SUPERVISOR,
    ),
)
