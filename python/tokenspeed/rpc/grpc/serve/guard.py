# SPDX-License-Identifier: MIT
"""In front of our services: bytes that are no message, and faults of our own, end a call with a status that says so.

Without it gRPC tells the caller UNKNOWN with the name of a Python exception, and logs a traceback for every message
that cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.rpc.grpc.serve.errors import refuse

logger = logging.getLogger("tokenspeed.grpc")

_OURS = "/tokenspeed."


@dataclass(frozen=True)
class _Unreadable:
    """What stands for a message that could not be parsed."""

    reason: str


class Guard(grpc.aio.ServerInterceptor):
    """Wraps each method once."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None or not method.startswith(_OURS):
                return handler
            self._wrapped[method] = _guarded(handler)
        return self._wrapped[method]


def _guarded(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    read = _lenient(handler.request_deserializer)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream), read, handler.response_serializer)
    return grpc.unary_unary_rpc_method_handler(_single(handler.unary_unary), read, handler.response_serializer)


def _lenient(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(payload: bytes) -> Any:
        try:
            return deserializer(payload)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


def _single(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _refuse_unreadable(request, context)
        try:
            return await answer(request, context)
        except grpc.aio.BaseError:
            raise  # a refusal
        except EngineDeadError as error:
            await refuse(context, 503, "engine_dead", "", str(error))
        except Exception as error:
            logger.exception("a call failed")
            await _refuse_unforeseen(error, context)

    return guarded


def _stream(answers: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[None]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> None:
        await _refuse_unreadable(request, context)
        try:
            async with aclosing(answers(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
        except grpc.aio.BaseError:
            raise  # a refusal
        except Exception as error:
            logger.exception("a call failed")
            await _refuse_unforeseen(error, context)

    return guarded


async def _refuse_unreadable(request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(request, _Unreadable):
        logger.warning("refused a message that cannot be read: %s", request.reason)
        await refuse(context, 400, "unreadable_message", "", f"the message cannot be read: {request.reason}")


async def _refuse_unforeseen(error: Exception, context: grpc.aio.ServicerContext) -> None:
    await refuse(context, 500, "internal_error", "", f"the server failed at it ({type(error).__name__})")
