# SPDX-License-Identifier: MIT
"""Earlier reasoning stays in the prompt where templates drop it, in the form that the model wrote it in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.gateway.text.kept_reasoning import Message, ThinkMarkers, render_keeping
from tokenspeed.gateway.text.parse.names import parsers_named
from tokenspeed.gateway.text.template import ChatTemplate, TemplateError

THINK = ThinkMarkers("<think>", "</think>")
_CALLS = "{% for c in m.tool_calls or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}<call>{% endfor %}"
# As Qwen3's: reasoning behind the last user's message only.
SINCE_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content or '' %}[{{ m.role }}]{{ '\n' }}"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}" + _CALLS + "<end>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
# As GLM's: an empty block where it is dropped, and another form.
_ELSE = "{% else %}{{ content }}"
_EMPTY = "{% elif m.role == 'assistant' %}{{ '\n<think></think>\n' + content }}" + _ELSE
EMPTY_BLOCK = (
    SINCE_LAST_USER.replace("<think>\n", "\n<think>").replace("\n</think>\n\n", "</think>\n").replace(_ELSE, _EMPTY)
)
# As DeepSeek R1's: never.
NEVER = SINCE_LAST_USER.replace("loop.index0 > ns.last", "false")

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
ASK, RESULT = {"role": "user", "content": "ask"}, {"role": "tool", "content": "out"}


def said(content: str, thought: str, *calls: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "reasoning_content": thought}
    return message | ({"tool_calls": list(calls)} if calls else {})


def kept(source: str, messages: Sequence[Message]) -> str:
    template = ChatTemplate(source, {})
    return render_keeping(messages, THINK, lambda shown: template.render(shown, add_generation_prompt=True))


@pytest.mark.parametrize(
    ("source", "opens", "closes"),
    [
        (SINCE_LAST_USER, "<think>\n", "\n</think>\n\n"),
        (EMPTY_BLOCK, "\n<think>", "</think>\n"),
        (NEVER, "<think>\n", "\n</think>\n\n"),
    ],
)
def test_three_turns_of_a_tool_loop_each_begin_with_the_turn_before_and_its_answer(
    source: str, opens: str, closes: str
) -> None:
    turns = [
        (said("", "Look it up: <b>\\1 & {{ x }}", CALL), "<call>", RESULT),
        (said("Here.", "Fine.\n\nSo.", CALL), "Here.\n<call>", ASK),
        (said("Done.", "Ok."), "Done.", ASK),
        (said("Bye.", "Bye?"), "Bye.", ASK),
    ]
    messages: list[Message] = [ASK]
    for answer, written, following in turns:
        before = kept(source, messages) + f"{opens}{answer['reasoning_content']}{closes}{written}<end>\n"
        messages += [answer, following]
        assert kept(source, messages).startswith(before)


def test_what_the_template_keeps_by_itself_and_messages_without_reasoning_are_as_ever() -> None:
    template = ChatTemplate(SINCE_LAST_USER, {})
    for messages in ([ASK], [ASK, said("", "Hm.", CALL), RESULT], [ASK, said("Hi", ""), ASK]):
        assert kept(SINCE_LAST_USER, messages) == template.render(messages, add_generation_prompt=True)


def test_a_template_that_refuses_the_messages_still_says_so() -> None:
    with pytest.raises(TemplateError, match="alternate"):
        kept("{{ raise_exception('must alternate') }}", [ASK, said("a", "b"), ASK])


def _folder() -> list[Path]:
    folder = os.environ.get("TOKENSPEED_CHAT_TEMPLATES")
    return sorted(Path(folder).glob("*.jinja")) if folder else []


@pytest.mark.parametrize("file", _folder(), ids=lambda file: file.stem)
def test_released_templates_with_think_blocks_show_each_reasoning_once_and_extend_the_turn_before(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    markers = parsers_named("auto", "auto", source).think_markers
    if markers is None:
        pytest.skip("no think blocks")
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

    def render(messages: Sequence[Message], add: bool = True) -> str:
        shown = render_keeping(messages, markers, lambda m: template.render(m, add_generation_prompt=add))
        return shown if add else shown.rstrip()

    one, two = said("Answer one.", "Thought one."), said("Answer two.", "Thought two.")
    first, second = [ASK, one, ASK], [ASK, one, ASK, two, ASK]
    try:
        texts = render(first), render(second)
    except TemplateError:
        pytest.skip("it refuses the conversation")
    assert [texts[1].count(f"Thought {number}.") for number in ("one", "two")] == [1, 1]
    assert texts[1].index("Thought one.") < texts[1].index("Answer one.") < texts[1].index("Thought two.")
    # Up to the second answer, both are the same prompt.
    assert texts[1].startswith(render([*first], add=False))
