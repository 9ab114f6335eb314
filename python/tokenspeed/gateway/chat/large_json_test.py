# SPDX-License-Identifier: MIT
"""Large bodies: the same as when they are decoded at once, with the loop free, and with limits that have names."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from tokenspeed.gateway.chat import large_json
from tokenspeed.gateway.chat.fields import parse_body
from tokenspeed.gateway.chat.large_json import LARGE, MOST_BRACKETS, MOST_NUMBERS, decode_large
from tokenspeed.gateway.http.errors import ApiError


class Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


def numbers(count: int) -> list[int]:
    return [random.Random(count).randrange(-5, 200_000) for _ in range(count)]


VALUES: list[Any] = [
    numbers(300_000),
    [0.5, -1e9, 3] * 100_000,
    [numbers(200_000), [], numbers(3), numbers(150_000)],
    [1, "a, 2]", None] * 50_000,
    [{"content": "[1, 2" * 100_000}],
    ["x" * 700_000, "y"],
    "1, 2" * 200_000,
    [[[1, 2]] * 50_000],
    [],
    None,
]


@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n ", " : ")])
def test_a_large_body_says_what_it_says_when_decoded_at_once(separators: tuple[str, str]) -> None:
    fields = {f"f{i}": value for i, value in enumerate(VALUES)}
    body = json.dumps(fields, separators=separators).encode()
    assert decode_large(body) == fields
    spaced = json.dumps({"a": VALUES[0]}).replace("[", "[ \n").replace("]", " \n]").encode()
    assert decode_large(spaced) == {"a": VALUES[0]}


def test_no_piece_of_a_long_array_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Watched:
        """Notes what becomes objects; a cut into raw fields makes none."""

        @staticmethod
        def decode(text: bytes, **options: Any) -> Any:
            if not options:
                sizes.append(len(text))
            return msgspec.json.decode(text, **options)

    monkeypatch.setattr(large_json, "json", Watched)
    decode_large(json.dumps({"prompt": numbers(500_000), "prompts": [numbers(50_000)] * 20}).encode())
    assert len(sizes) > 25
    assert max(sizes) < 400_000


def test_others_run_while_a_large_body_is_decoded() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> int:
        task = asyncio.create_task(others())
        parsed, _ = await parse_body(json.dumps({"tokens": list(range(300_000))}).encode(), Tokens)
        task.cancel()
        return len(parsed.tokens)

    assert asyncio.run(main()) == 300_000
    assert turns > 10


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"tokens": [' + b"1," * MOST_NUMBERS + b"1]}", "array_above_max_length", "tokens"),
        (b'{"tokens": [' + b"{}," * MOST_BRACKETS + b"{}]}", "array_above_max_length", "tokens"),
        (b"[" + b"1," * LARGE + b"1]", "invalid_json", None),
        (b'{"tokens": [' + b"1," * LARGE + b"]}", "invalid_json", None),
        (b'{"tokens": [' + b"1 " * LARGE + b"]}", "invalid_json", None),
        (b'{"tokens": [' + b"1," * LARGE + b'"x"]}', "invalid_type", f"tokens[{LARGE}]"),
        (b'{"tokens": ' + b"[" * LARGE, "invalid_json", None),
    ],
)
def test_what_is_wrong_with_a_large_body_is_named(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(parse_body(body, Tokens))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)
