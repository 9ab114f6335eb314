# SPDX-License-Identifier: MIT
"""What can be told to the sender of a message that an engine cannot read: who waits for it, and why it gets nothing.

A message whose id can be read is answered like any other, by a row that aborts or a reply that fails; otherwise its
sender would wait until its own patience ends. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenspeed.config.sampling import MAX_ID_CHARS
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.wire import UnreadCall, UnreadRequest

_MAX_CALL_ID = 2**63 - 1

_elements = msgspec.msgpack.Decoder(list[msgspec.Raw])


def unread(frames: Sequence[bytes], error: wire.WireError) -> UnreadRequest | UnreadCall | None:
    """frames: of a message that `wire.decode_engine_message` refused with `error`. None where nobody can be told."""
    if len(frames) < 2 or frames[0] == wire.FRAME_ABORT:
        return None  # nobody waits for the answer to an abort
    try:
        elements = _elements.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if frames[0] == wire.FRAME_CONTROL:
        found = _value(elements[0]) if elements else None
        return UnreadCall(found, str(error)) if found is not None and _is_id(found) else None
    # Behind its name a message has its id: a request first, one for encode workers behind what it leaves out.
    rid = next((found for element in elements[1:5] if isinstance(found := _value(element), str)), None)
    if rid is None or not _is_id(rid):
        return None
    if frames[0] == wire.FRAME_ADD:
        return UnreadRequest(rid, 400, "invalid_request", str(error))
    return UnreadRequest(rid, 501, "unsupported", str(error))


def _value(element: msgspec.Raw) -> str | int | None:
    """A scalar; None of anything else."""
    try:
        found: str | int | None = msgspec.msgpack.decode(element, type=str | int | None)
        return found
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_id(found: str | int) -> bool:
    return 0 < len(found) <= MAX_ID_CHARS if isinstance(found, str) else abs(found) <= _MAX_CALL_ID
