# SPDX-License-Identifier: MIT
"""Chat templates of released models render to the letter as `transformers` renders them, or are refused where it
refuses them.

The templates are not ours to pass on: `TOKENSPEED_CHAT_TEMPLATES` names a folder of `*.jinja` files (contributing.md
says where from); without it there is nothing to compare. What is written here stands for those that are always there.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenspeed.gateway.text.template import ChatTemplate, TemplateError

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city, in <°C> & such",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name"},
                    "days": {"type": "integer", "default": 1},
                    "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city"],
            },
        },
    }
]
ASK = {"role": "user", "content": "안녕 <b>hi</b> & 'bye'"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
SAID = {"role": "assistant", "content": "  Hello! "}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"t": 21}'}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one": ([ASK], {}),
    "system": ([SYSTEM, ASK], {}),
    "turns": ([SYSTEM, ASK, SAID, ASK], {}),
    "thought": ([ASK, THOUGHT, ASK], {}),
    "thinking off": ([ASK], {"enable_thinking": False, "thinking": False}),
    "thinking on": ([ASK, THOUGHT, ASK], {"enable_thinking": True, "thinking": True}),
    "effort": ([ASK], {"reasoning_effort": "high"}),
    "tools": ([SYSTEM, ASK], {"tools": TOOLS}),
    "call": ([ASK, CALL, RESULT], {"tools": TOOLS}),
    "call and on": ([SYSTEM, ASK, CALL, RESULT, SAID, ASK], {"tools": TOOLS}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    "documents": ([ASK], {"documents": [{"title": "T", "text": "body"}]}),
    "ends with an answer": ([ASK, SAID], {}),
}

OWN = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tools": "{%- if tools %}\n    {{- tools | tojson(indent=4) }}\n{%- endif %}\n{%- for m in messages %}\n"
    "  {%- if m.role == 'tool' %}{{ m.content | trim }}{% elif m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ bos_token + (m.content if m.content is string else (m.content | map(attribute='text') | join)) }}"
    "{% endif %}{%- generation %}{{ loop.index }}{% endgeneration %}\n{%- endfor %}",
    "strict": "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == ns.last %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'tool' %}{% break %}{% endif %}"
    "{% set ns.last = m.role %}{{ m.content }}{{ strftime_now('%Y') }}{% endfor %}",
}


def templates() -> dict[str, str]:
    found = dict(OWN)
    folder = os.environ.get("TOKENSPEED_CHAT_TEMPLATES")
    if folder:
        files = sorted(Path(folder).glob("*.jinja"))
        assert files, f"{folder} has no *.jinja"
        found.update({file.stem: file.read_text(encoding="utf-8") for file in files})
    return found


def theirs(source: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """None: refused."""
    try:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **SPECIALS, **options)
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None
    return rendered[0]


@functools.cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIALS)


def ours(source: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """None: refused."""
    known = {name: options[name] for name in ("tools", "documents") if name in options}
    variables = {name: value for name, value in options.items() if name not in (*known, "add_generation_prompt")}
    template = compiled(source)
    if not template.parts and any(isinstance(message["content"], list) for message in messages):
        # Such a template wants text; ours joins the parts, which transformers leaves to the caller.
        joined = [{**m, "content": "\n".join(part["text"] for part in m["content"])} for m in messages]
        assert ours(source, joined, options) == theirs(source, joined, options)
        return theirs(source, messages, options)
    try:
        return template.render(
            messages, add_generation_prompt=options["add_generation_prompt"], variables=variables, **known
        )
    except TemplateError:
        return None


@pytest.mark.parametrize("name", templates())
def test_every_template_renders_every_conversation_as_transformers_does(name: str) -> None:
    source = templates()[name]
    different = {}
    for case, (messages, given) in CONVERSATIONS.items():
        for prompt in (False, True):
            options = {"add_generation_prompt": prompt, **given}
            expected, actual = theirs(source, messages, options), ours(source, messages, options)
            if expected != actual:
                different[case, prompt] = (expected, actual)
    assert not different
    assert name not in OWN or theirs(source, [ASK], {"add_generation_prompt": True})
