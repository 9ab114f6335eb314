# SPDX-License-Identifier: MIT
"""Packed bodies (`content-encoding: gzip` or `deflate`, RFC 9110 §8.4.1), unpacked on a thread with a limit on what
comes out.

The limit holds while unpacking: a body of a few kilobytes that stands for gigabytes costs what it may grow to, and no
more. The HTTP library would unpack on the loop.
"""

from __future__ import annotations

import asyncio
import zlib

from tokenspeed.gateway.http.errors import ApiError

MOST_GROWTH = 64
"""Text packs tenfold, long lists of one number fiftyfold; only what is made to grow grows more."""
ALWAYS_ALLOWED = 16 << 20
"""Bytes that come out of however few."""
_MOST_MEMBERS = 64
"""Packed bodies in one, end to end, which gzip allows."""
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


async def unpacked(packed: bytes, encoding: str, limit: int) -> bytes:
    """What `packed` stands for. limit: bytes, 0 for no limit. Raises `ApiError` 400, 413 and 415."""
    if encoding in ("", "identity") or not packed:
        return packed
    if encoding not in ("gzip", "x-gzip", "deflate"):
        message = "the body is encoded in a way that this server cannot read; gzip and deflate are"
        raise ApiError(415, "unsupported_encoding", message)
    return await asyncio.to_thread(_inflate, packed, encoding, limit)


def _inflate(packed: bytes, encoding: str, limit: int) -> bytes:
    grown = max(ALWAYS_ALLOWED, MOST_GROWTH * len(packed))
    room = min(grown, limit) if limit else grown
    kind = _GZIP
    if encoding == "deflate":
        kind = _ZLIB if packed[0] & 0xF == 8 else _RAW  # many clients leave out the header that should be there
    parts: list[bytes] = []
    for _ in range(_MOST_MEMBERS):
        stream = zlib.decompressobj(kind)
        try:
            part = stream.decompress(packed, room + 1)
        except zlib.error:
            raise _unreadable(encoding) from None
        room -= len(part)
        if room < 0:
            raise _too_large(limit)
        if not stream.eof:
            raise _unreadable(encoding)
        parts.append(part)
        packed = stream.unused_data.lstrip(b"\0")
        if not packed:
            return b"".join(parts)
    raise ApiError(400, "invalid_body", f"the body is more than {_MOST_MEMBERS} packed ones end to end")


def _unreadable(encoding: str) -> ApiError:
    return ApiError(400, "invalid_body", f"the body is not what its headers say: it is no {encoding}, or it is cut")


def _too_large(limit: int) -> ApiError:
    most = f"more than {limit} bytes, or " if limit else ""
    message = f"the body is too large: unpacked it is {most}{MOST_GROWTH} times as long as it came"
    return ApiError(413, "request_too_large", message)
