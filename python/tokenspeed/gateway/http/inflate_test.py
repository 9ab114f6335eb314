# SPDX-License-Identifier: MIT
"""Packed bodies, as clients and attackers send them, through a running gateway and alone."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator

import pytest

from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.http.inflate import ALWAYS_ALLOWED, unpacked
from tokenspeed.gateway.testing.fake_engine import replying
from tokenspeed.gateway.testing.running import RunningGateway, ids

TEXT = json.dumps({"prompt": "hello " * 1000}).encode()
EMPTY_MEMBER = gzip.compress(b"")


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids("ok"))], ["--max-payload-size", str(64 << 20)]) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("GZIP", gzip.compress(TEXT) + b"\0" * 100),
        ("x-gzip", gzip.compress(TEXT[:50]) + gzip.compress(TEXT[50:])),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw_deflate(TEXT)),
        ("identity", TEXT),
    ],
)
def test_a_packed_body_is_what_it_was_before(running: RunningGateway, encoding: str, packed: bytes) -> None:
    status, answer = running.post("/v1/tokenize", packed, {"content-encoding": encoding})
    assert (status, answer["count"]) == (200, 6000)


@pytest.mark.parametrize(
    ("encoding", "packed", "status", "code"),
    [
        ("gzip", gzip.compress(TEXT)[:-9], 400, "invalid_body"),
        ("gzip", gzip.compress(TEXT) + b"more", 400, "invalid_body"),
        ("gzip", EMPTY_MEMBER * 100_000, 400, "invalid_body"),
        ("deflate", gzip.compress(TEXT), 400, "invalid_body"),
        ("gzip", gzip.compress(b" " * (2 * ALWAYS_ALLOWED)), 413, "request_too_large"),
        ("deflate", zlib.compress(zlib.compress(b" " * (64 << 20)) * 1000), 413, "request_too_large"),
        ("br", b"x", 415, "unsupported_encoding"),
        ("gzip, gzip", gzip.compress(gzip.compress(TEXT)), 415, "unsupported_encoding"),
    ],
)
def test_what_cannot_be_unpacked_is_the_callers_fault(
    running: RunningGateway, encoding: str, packed: bytes, status: int, code: str
) -> None:
    got, answer = running.post("/v1/tokenize", packed, {"content-encoding": encoding})
    assert (got, answer["error"]["code"]) == (status, code)


def test_a_body_that_grows_without_end_is_let_go_where_the_limit_is() -> None:
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(1024)) + packer.flush()
    for limit in (0, 1 << 30, 1000):
        with pytest.raises(ApiError) as refused:
            asyncio.run(unpacked(bomb, "deflate", limit))
        assert refused.value.status == 413


def test_a_large_body_that_packs_as_text_does_is_taken() -> None:
    text = b"".join(b"w%d " % (number * 7919 % 100_003) for number in range(3_500_000))
    assert len(text) > ALWAYS_ALLOWED
    assert asyncio.run(unpacked(gzip.compress(text, 1), "gzip", 0)) == text
