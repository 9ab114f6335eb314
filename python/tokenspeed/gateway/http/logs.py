# SPDX-License-Identifier: MIT
"""Log lines of the gateway process: to stderr, as text or as JSON objects, and to a file if one is asked for. A file
that is moved away is begun anew, as programs that turn logs over expect. Called once, at start."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from logging.handlers import WatchedFileHandler
from pathlib import Path

from tokenspeed.config.gateway_listeners import LogConfig
from tokenspeed.gateway.chat.format import encode_json

_access = logging.getLogger("tokenspeed.gateway.access")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return encode_json(line).decode()


class LogsUnwritable(Exception):
    """The folder for log files cannot be used; one line that says why."""


def configure_logs(config: LogConfig) -> None:
    """Send everything from the level on to stderr, and to `gateway-PID.log` of the folder. Raises `LogsUnwritable`."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if config.folder is not None:
        try:
            Path(config.folder).mkdir(parents=True, exist_ok=True)
            file = Path(config.folder) / f"gateway-{os.getpid()}.log"
            handlers.append(WatchedFileHandler(file, encoding="utf-8"))
        except OSError as error:
            raise LogsUnwritable(f"--log-dir: {config.folder}: {error.strerror or error}") from None
    text = logging.Formatter("%(asctime)s %(levelname)s gateway %(message)s")
    for handler in handlers:
        handler.setFormatter(_JsonLines() if config.as_json else text)
    logging.basicConfig(level=_LEVELS[config.level], handlers=handlers, force=True)


def log_access(facts: Mapping[str, object]) -> None:
    """A line of a request. What clients wrote stands in quotes, so that it cannot look like a line of its own."""
    words = (f"{name}={encode_json(value).decode()}" for name, value in facts.items())
    _access.info("request %s", " ".join(words), extra={"fields": facts})
