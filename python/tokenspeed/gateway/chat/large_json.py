# SPDX-License-Identifier: MIT
"""The JSON of a large body, decoded in pieces on a thread of its own, so that other requests go on meanwhile.

The interpreter's lock is held as long as one call of the JSON library lasts, which ten million token ids make a third
of a second. So the body is first cut into its fields, which is quick, and long arrays of numbers are decoded some
thousands at a time. Pure; the caller brings the thread.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import json

from tokenspeed.gateway.http.errors import ApiError, invalid

LARGE = 1 << 20
"""Bytes of a body from which on this pays."""
MOST_NUMBERS = 1 << 22
"""Of one array: more than any context holds."""
MOST_BRACKETS = 1 << 20
"""Arrays and objects of one field."""
_PIECE = 1 << 18
"""Bytes that are decoded at once."""
_NUMBERS = b"0123456789+-.eE, \t\r\n"


def decode_large(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises `ApiError` 400, and what the library raises for text that is no JSON."""
    try:
        fields = json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise ApiError(400, "invalid_json", "the body must be a JSON object") from None
    return {name: _value(bytes(raw).strip(), name) for name, raw in fields.items()}


def _value(text: bytes, name: str) -> Any:
    """What `text` says, which stands without white space around it in the field `name`."""
    if len(text) <= _PIECE:
        return json.decode(text)
    if text.count(b"[") + text.count(b"{") > MOST_BRACKETS:
        raise invalid(name, "array_above_max_length", f"{name} has more than {MOST_BRACKETS} arrays and objects")
    if text.startswith(b"[") and text[1:_PIECE].lstrip().startswith(b"["):
        return [_value(bytes(raw).strip(), name) for raw in json.decode(text, type=list[msgspec.Raw])]
    if text.translate(None, _NUMBERS) == b"[]":
        return _numbers(text, name)
    return json.decode(text)


def _numbers(text: bytes, name: str) -> list[Any]:
    """An array of numbers and nothing else."""
    length = text.count(b",") + 1
    if length > MOST_NUMBERS:
        raise invalid(name, "array_above_max_length", f"{name} has {length} numbers, at most {MOST_NUMBERS}")
    out: list[Any] = []
    begin, end = 1, len(text) - 1
    while begin < end:
        cut = text.find(b",", begin + _PIECE, end)
        cut = end if cut < 0 else cut
        out += json.decode(b"[" + text[begin:cut] + b"]")
        begin = cut + 1
    return out
