# SPDX-License-Identifier: MIT
"""Limits of messages and the life of idle connections, the same at both ends of a gRPC lane."""

from __future__ import annotations

import os

MAX_MESSAGE_ENV = "TOKENSPEED_GRPC_MAX_MESSAGE_BYTES"
DEFAULT_MAX_MESSAGE_BYTES = 256 * 2**20
_CEILING_BYTES = 2**31 - 1


class LimitError(ValueError):
    """The environment's limit cannot be used; one line that names it."""


def max_message_bytes() -> int:
    """Of one message, either way: from TOKENSPEED_GRPC_MAX_MESSAGE_BYTES, up to gRPC's 2 GiB - 1. Raises LimitError."""
    text = os.environ.get(MAX_MESSAGE_ENV)
    if not text:
        return DEFAULT_MAX_MESSAGE_BYTES
    if not text.isdecimal() or not int(text):
        raise LimitError(f"{MAX_MESSAGE_ENV}: {text!r} is not a number of bytes")
    return min(int(text), _CEILING_BYTES)


def message_options(limit_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments for servers and clients."""
    return [("grpc.max_send_message_length", limit_bytes), ("grpc.max_receive_message_length", limit_bytes)]


def server_options(limit_bytes: int) -> list[tuple[str, int]]:
    """Clients ping every few seconds, also while nothing is asked or a long prefill says nothing: none is a fault."""
    return [
        *message_options(limit_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # A port that is taken is an error, not a second server behind it.
        ("grpc.so_reuseport", 0),
    ]
