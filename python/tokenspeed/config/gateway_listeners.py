# SPDX-License-Identifier: MIT
"""The gateway's settings of its further listeners and of what it writes: flags and what they come to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import Flag, FlagError
from tokenspeed.config.flags_rows import flag as _flag

ACCESS_FIELDS = ("client_addr", "forwarded_for", "user_agent", "request_bytes", "response_bytes", "worker")
_NAMELESS = ("tenant", "key_id")


@dataclass(frozen=True)
class ListenerConfig:
    """Ports beside the main one; None: there is none."""

    admin_host: str
    admin_port: int | None
    """Takes the paths of operators away from the main port."""
    health_port: int | None
    """Answers probes, as the main port does too."""


@dataclass(frozen=True)
class LogConfig:
    """What log lines there are and where they go."""

    level: str
    as_json: bool
    folder: str | None
    """Also into a file of this folder; None: to stderr alone."""
    access_fields: tuple[str, ...]
    """Of `ACCESS_FIELDS`, told of every request; none: requests have no lines."""


_HTTP, _LOGS = "HTTP", "Logs and metrics"
_ANY = " ".join(ACCESS_FIELDS)
LOG_LEVELS = ("debug", "info", "warn", "error")

LISTENER_FLAGS: tuple[Flag, ...] = (
    _flag("--admin-port", "int", None, _HTTP, "operators' paths and probes on a port of their own, not the main one"),
    _flag("--admin-host", "str", None, _HTTP, "address for that port; default: --host"),
    _flag("--health-check-port", "int", None, _HTTP, "also answer /health, /liveness and /readiness on this port"),
    _flag(
        "--max-buffered-request-bytes",
        "int",
        1048576,
        _HTTP,
        "accepted for scripts: nothing is held just to be retried",
    ),
    _flag("--log-level", "str", "info", _LOGS, "least severe lines that are written", LOG_LEVELS),
    _flag("--log-json", "switch", False, _LOGS, "log lines as JSON objects"),
    _flag("--log-dir", "str", None, _LOGS, "folder for a file of log lines, beside stderr; made if need be"),
    _flag("--access-log-fields", "append", (), _LOGS, f"a line of every request, with any of {_ANY}"),
)

LISTENER_LISTS = frozenset({"--access-log-fields"})

LISTENER_RANGES: tuple[tuple[str, float, float], ...] = (
    ("--admin-port", 0, 65535),
    ("--health-check-port", 0, 65535),
    ("--max-buffered-request-bytes", 0, 2**40),
)


def listener_config(values: dict[str, Any]) -> ListenerConfig:
    """The slice of the parsed flags. Raises `FlagError`."""
    if values["admin_host"] is not None and values["admin_port"] is None:
        raise FlagError("--admin-host", "it needs --admin-port")
    return ListenerConfig(values["admin_host"] or values["host"], values["admin_port"], values["health_check_port"])


def log_config(values: dict[str, Any]) -> LogConfig:
    """The slice of the parsed flags. Raises `FlagError`."""
    fields = _access_fields(values["access_log_fields"])
    return LogConfig(values["log_level"], values["log_json"], values["log_dir"], fields)


def _access_fields(words: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    for name in names:
        if name in _NAMELESS:
            raise FlagError("--access-log-fields", f"{name} is not known here: keys have no names")
        if name not in ACCESS_FIELDS:
            raise FlagError("--access-log-fields", f"{name!r} is not one of {', '.join(ACCESS_FIELDS)}")
    return tuple(dict.fromkeys(names))
