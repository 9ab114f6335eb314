# SPDX-License-Identifier: MIT
"""Where a next prompt leaves the turn before it, and what the metrics say; reasoning that is kept leaves it nowhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.gateway.chat.turns import Difference, Turns, continuation
from tokenspeed.gateway.testing.fake_engine import END_TOKEN, Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

PATH = "/v1/chat/completions"
# Drops the reasoning of earlier turns, as many templates do.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% if not loop.last %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<end>[assistant]{% endif %}"
)


def answer(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    yield from replying(ids("<think>\nWell.\n</think>\n\nAnswer."))(request)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_difference_is_found_wherever_it_is() -> None:
    draw = random.Random(1)
    first, second = continuation([user("a")]), continuation([user("a"), {"role": "assistant"}, user("b")])
    assert second.before == first.this and first.before is None
    for _ in range(200):
        old = [draw.randrange(5) for _ in range(draw.randrange(1, 40))]
        new = [*old[: draw.randrange(len(old) + 1)], *(draw.randrange(5) for _ in range(draw.randrange(9)))]
        turns = Turns()
        turns.remember(first, old[:3], old[3:])
        pairs = enumerate(zip(old, new))
        expected = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
        assert turns.difference(second, new) == Difference(expected, len(old))
        assert turns.difference(first, new) is None and turns.difference(continuation([user("x")]), new) is None


@pytest.mark.parametrize("turns", [Turns(max_tokens=100), Turns(max_turns=3)])
def test_memory_is_bounded_and_a_turn_asked_again_counts_once(turns: Turns) -> None:
    for number in range(30):
        turns.remember(continuation([user(str(number % 4))]), [1] * 20, [2] * 10)
    later = [continuation([user(str(number)), {"role": "assistant"}]) for number in range(4)]
    assert [turns.difference(turn, [1] * 20) is not None for turn in later] == [True, True, False, True]


@pytest.mark.parametrize(("flags", "outcome"), [([], "diverges"), (["--keep-reasoning"], "extends")])
def test_a_tool_loop_of_three_turns_loses_its_prefix_or_keeps_it(tmp_path: Any, flags: list[str], outcome: str) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(TEMPLATE)
    words = ["--chat-template", str(template), "--reasoning-parser", "qwen3", *flags]
    with RunningGateway([answer], words) as gateway:
        messages = [user("one")]
        for text in ("two", "three"):
            message = gateway.post(PATH, {"messages": messages})[1]["choices"][0]["message"]
            assert message["reasoning_content"] == "Well."
            messages += [message, user(text)]
        assert gateway.post(PATH, {"messages": messages})[0] == 200
        sent = [request.input_ids for request in gateway.engines[0].seen.requests]
        whole = [*ids("<think>\nWell.\n</think>\n\nAnswer."), END_TOKEN]
        extends = [new[: len(old) + len(whole)] == [*old, *whole] for old, new in itertools.pairwise(sent)]
        assert extends == [outcome == "extends"] * 2
        text = gateway.request("GET", "/metrics")[2].decode()
        assert f'tokenspeed:turns_total{{outcome="{outcome}"}} 2.0' in text
        diverged = 0 if outcome == "extends" else 2
        assert f"tokenspeed:first_diverging_token_count {float(diverged)}" in text
        if flags:  # a request may say otherwise
            plain = {"messages": messages, "keep_reasoning": False}
            assert gateway.post(PATH, plain)[0] == 200
            assert len(gateway.engines[0].seen.requests[-1].input_ids) < len(sent[-1])


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_a_request_of_any_conversation_api_may_keep_its_reasoning(tmp_path: Any, api: str) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(TEMPLATE)
    words = ["--chat-template", str(template), "--reasoning-parser", "qwen3"]
    whole = [*ids("<think>\nWell.\n</think>\n\nAnswer."), END_TOKEN]

    def second(gateway: RunningGateway, more: dict[str, Any]) -> list[int]:
        """The prompt of a second turn."""
        if api == "messages":
            asked: dict[str, Any] = {"max_tokens": 100, **more}
            answer = gateway.post("/v1/messages", {"messages": [user("one")], **asked})[1]
            assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
            turns = [user("one"), {"role": "assistant", "content": answer["content"]}, user("two")]
            assert gateway.post("/v1/messages", {"messages": turns, **asked})[0] == 200
        else:
            answer = gateway.post("/v1/responses", {"input": "one", **more})[1]
            assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
            turns = [user("one"), *answer["output"], user("two")]
            assert gateway.post("/v1/responses", {"input": turns, **more})[0] == 200
        return list(gateway.engines[0].seen.requests[-1].input_ids)

    with RunningGateway([answer], words) as gateway:
        for more, keeps in (({}, False), ({"keep_reasoning": True}, True), ({"keep_reasoning": False}, False)):
            later = second(gateway, more)
            first = list(gateway.engines[0].seen.requests[-2].input_ids)
            assert (later[: len(first) + len(whole)] == [*first, *whole]) is keeps
