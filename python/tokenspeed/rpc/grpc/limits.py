# SPDX-License-Identifier: MIT
"""Limits of messages and the life of idle connections, the same at both ends of a gRPC lane."""

from __future__ import annotations

import os

MAX_MESSAGE_ENV = "TOKENSPEED_GRPC_MAX_MESSAGE_BYTES"
DEFAULT_MAX_MESSAGE_BYTES = 256 * 2**20
KEEPALIVE_ENV, KEEPALIVE_TIMEOUT_ENV = "TOKENSPEED_GRPC_KEEPALIVE_TIME_MS", "TOKENSPEED_GRPC_KEEPALIVE_TIMEOUT_MS"
_CEILING_BYTES = 2**31 - 1
_CEILING_MS = 2**31 - 1
"""With which a channel never pings."""


class LimitError(ValueError):
    """The environment's limit cannot be used; one line that names it."""


def max_message_bytes() -> int:
    """Of one message, either way: from TOKENSPEED_GRPC_MAX_MESSAGE_BYTES, up to gRPC's 2 GiB - 1. Raises LimitError."""
    return min(_number(MAX_MESSAGE_ENV, DEFAULT_MAX_MESSAGE_BYTES, "bytes"), _CEILING_BYTES)


def _number(name: str, default: int, unit: str) -> int:
    text = os.environ.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**63):
        raise LimitError(f"{name}: {text!r} is not a number of {unit}")
    return int(text)


def message_options(limit_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments for servers and clients."""
    return [("grpc.max_send_message_length", limit_bytes), ("grpc.max_receive_message_length", limit_bytes)]


def keepalive_options() -> list[tuple[str, int]]:
    """A peer that vanishes closes no connection: whoever hears nothing for a while pings, and one that does not answer
    that is gone, with its calls. The environment's milliseconds are instead of 30 and 10 seconds. Raises LimitError."""
    timeout_ms = min(_number(KEEPALIVE_TIMEOUT_ENV, 10_000, "milliseconds"), _CEILING_MS)
    return [
        ("grpc.keepalive_time_ms", min(_number(KEEPALIVE_ENV, 30_000, "milliseconds"), _CEILING_MS)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # Any ping's answer is waited for so long; by default a minute, whatever the line before says.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limit_bytes: int) -> list[tuple[str, int]]:
    """Clients ping every few seconds, also while nothing is asked or a long prefill says nothing: none is a fault."""
    return [
        *message_options(limit_bytes),
        *keepalive_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # A port that is taken is an error, not a second server behind it.
        ("grpc.so_reuseport", 0),
    ]
