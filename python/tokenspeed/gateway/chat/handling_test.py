# SPDX-License-Identifier: MIT
"""`priority` and `cache_salt`: from every API to the engine, or 400."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.gateway.testing.fake_engine import replying
from tokenspeed.gateway.testing.running import RunningGateway, ids

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([replying(ids("Paris"))]) as running:
        yield running


def test_priority_and_cache_salt_reach_the_engine_in_every_api(gateway: RunningGateway) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/generate", {"text": "hi"}),
    ]
    for path, body in asked:
        for priority, salt in ((-3, "tenant é"), (0, "")):
            assert gateway.post(path, {**body, "priority": priority, "cache_salt": salt})[0] == 200
            sent = gateway.engines[0].seen.requests[-1]
            assert (sent.priority, sent.cache_salt) == (priority, salt or None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 2**31), ("priority", "high"), ("cache_salt", "x" * 1025), ("extra_key", "a")],
)
def test_a_priority_or_salt_that_cannot_be_kept_is_refused(gateway: RunningGateway, field: str, value: Any) -> None:
    status, answer = gateway.post("/v1/chat/completions", {**CHAT, field: value})
    assert (status, answer["error"]["param"]) == (400, field)


def test_a_whole_number_may_be_written_with_a_point() -> None:
    with RunningGateway([replying(ids("x" * 20))]) as gateway:
        for name in ("max_tokens", "max_completion_tokens"):
            body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{name}": 3.0, "n": 1e0, "temperature": 0.0}}'
            status, answer = gateway.post("/v1/chat/completions", body.encode())
            assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        for value in ("3.5", "1e300", '"3"'):
            body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": {value}}}'
            status, answer = gateway.post("/v1/chat/completions", body.encode())
            assert (status, answer["error"]["param"]) == (400, "max_tokens")
