# SPDX-License-Identifier: MIT
"""Chat templates render as transformers renders them, and cannot do harm."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from tokenspeed.gateway.text.template import ChatTemplate, TemplateError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[Any] | None = None, **options: Any) -> str:
    options.setdefault("add_generation_prompt", False)
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or USER, **options)


def test_the_generation_prompt_is_added_when_asked_for() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n"
    assert render(CHATML, add_generation_prompt=True).endswith("<|im_start|>assistant\n")


def test_blocks_leave_no_white_space_behind() -> None:
    assert render("{% if true %}\n    {% if true %}\na\n    {% endif %}\n{% endif %}\n") == "a\n"


def test_json_is_written_without_html_escapes() -> None:
    template = "{{ messages[0]['content'] | tojson }}{{ {'a': 'é', 'b': 1} | tojson(indent=2) }}"
    assert render(template, [{"role": "user", "content": "<&'안"}]) == '"<&\'안"{\n  "a": "é",\n  "b": 1\n}'


def test_the_generation_block_shows_its_body() -> None:
    assert render("a{% generation %}b{{ bos_token }}{% endgeneration %}c") == "ab<s>c"


def test_loop_controls_and_the_date_are_there() -> None:
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0]['missing'] + 'x' }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] | no_such_filter }}",
        "{% include 'other' %}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_an_error_of_its_own_kind(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_a_template_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(TemplateError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_text_parts_are_joined_for_a_template_that_expects_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(CHATML, parts) == "<|im_start|>user\na\nb<|im_end|>\n"


def test_parts_stay_parts_for_a_template_that_loops_over_them() -> None:
    source = "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(source, parts) == "[a][b]"


def test_variables_of_the_caller_reach_the_template_but_do_not_replace_the_messages() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}"
    assert render(source, variables={"enable_thinking": False, "messages": []}) == "False1"


QUEUE = (
    "{%- set waiting = namespace(ids=[]) -%}{%- for m in messages -%}"
    "{%- for call in m.tool_calls or [] -%}{%- set _ = waiting.ids.append(call.id) -%}{%- endfor -%}"
    "{%- if m.role == 'tool' -%}## {{ waiting.ids.pop(0) }}: {{ m.content }};{%- endif -%}{%- endfor -%}"
    "{%- set last = messages[1:] -%}{%- set _ = last.pop() -%}{{ last | length }}{{ messages | tojson | length }}"
)


def test_a_template_may_change_lists_of_its_own_and_nobody_elses() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}, {"id": "b"}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    before = copy.deepcopy(messages)
    template = ChatTemplate(QUEUE, {})
    for _ in range(2):
        shown = template.render(messages, add_generation_prompt=False)
        assert shown == f"## a: 1;## b: 2;1{len(json.dumps(messages))}"
        assert messages == before


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = [].append(1) %}{{ ''.__class__.__mro__ }}",
        "{% set x = [].append(1) %}{{ messages.append(1) }}",
        "{% set x = [].append(1) %}{{ messages[0].update(role='system') }}",
        "{% set x = [].append(1) %}{{ raise_exception.__globals__['json'] }}",
        "{% set x = [].append(1) %}{{ ''|attr('__class__') }}{{ messages.__class__() }}",
        "{{ messages|attr('pop')() }}",
    ],
)
def test_a_template_that_changes_lists_is_in_the_sandbox_too(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], add_generation_prompt=False)
