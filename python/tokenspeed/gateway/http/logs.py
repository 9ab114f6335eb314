# SPDX-License-Identifier: MIT
"""Log lines of the gateway process: to stderr, as text or as JSON objects. Called once, at start."""

from __future__ import annotations

import logging
import sys

from tokenspeed.gateway.chat.format import encode_json

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return encode_json(line).decode()


def configure_logs(level: str, as_json: bool) -> None:
    """Send everything from `level` (debug, info, warn, error) on to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s gateway %(message)s")
    handler.setFormatter(_JsonLines() if as_json else text)
    logging.basicConfig(level=_LEVELS[level], handlers=[handler], force=True)
