# SPDX-License-Identifier: MIT
"""Refusals as gRPC statuses. The message is `code: sentence`; code and field also stand in the trailing metadata."""

from __future__ import annotations

from typing import NoReturn

import grpc

CODE_KEY, FIELD_KEY = "tokenspeed-error-code", "tokenspeed-error-field"

_BY_HTTP = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


async def refuse(context: grpc.aio.ServicerContext, status: int, code: str, field: str, text: str) -> NoReturn:
    """End the call. status: as HTTP has it."""
    context.set_trailing_metadata(((CODE_KEY, code), (FIELD_KEY, field)))
    await context.abort(_BY_HTTP.get(status, grpc.StatusCode.INTERNAL), f"{code}: {text}")
    raise AssertionError("abort raises")
