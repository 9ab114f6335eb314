# SPDX-License-Identifier: MIT
"""Refusals as gRPC statuses. The message is `code: sentence`; code and field also stand in the trailing metadata.

Fields have the names that they have in the protocol, which are not always those of the engine.
"""

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
_NAMES = {
    "prompt": "input_ids",
    "rid": "request_id",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprob_start": "logprob_start_len",
    "ebnf": "ebnf_grammar",
    "seed": "sampling_seed",
}


async def refuse(context: grpc.aio.ServicerContext, status: int, code: str, field: str, text: str) -> NoReturn:
    """End the call. status: as HTTP has it. field: by the engine's name; "" for none."""
    named = _NAMES.get(field, field)
    if named != field and text.startswith((f"{field}:", f"{field} ")):
        text = named + text[len(field) :]
    context.set_trailing_metadata(((CODE_KEY, code), (FIELD_KEY, named)))
    await context.abort(_BY_HTTP.get(status, grpc.StatusCode.INTERNAL), f"{code}: {text}")
    raise AssertionError("abort raises")
