# SPDX-License-Identifier: MIT
"""Calls that models write not quite as their format has it, and texts that are made to cost a parser its time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenspeed.gateway.text.parse.events import Parsed
from tokenspeed.gateway.text.parse.names import parsers_named
from tokenspeed.gateway.text.parse.tools import Tools

NAMES = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "where": {"type": "object"}}},
    "now": {},
}
PARIS = '{"city": "Paris"}'


def parsed(parser: str, text: str, schemas: dict[str, Any] | None = None) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls), which cuts must not change."""
    results = []
    for width in (len(text), 1, 2, 3, 7):
        machine, joined = parsers_named(None, parser, "").machine(Tools(schemas or NAMES), True, "", None), Parsed()
        assert machine is not None
        for start in range(0, len(text), width):
            joined.add(machine.feed(text[start : start + width]))
        results.append(joined.add(machine.close()))
    assert all(result == results[0] for result in results)
    return results[0].text, [(call.name, call.arguments) for call in results[0].calls]


@pytest.mark.parametrize("close", ["\n</tool_call>", ""])
def test_qwen_coder_may_leave_out_the_tag_around_its_calls(close: str) -> None:
    call = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
    assert parsed("qwen_coder", f"Let me.\n\n{call}{close}") == ("Let me.", [("weather", PARIS)])
    two = f"{call}\n<function=now>\n</function>{close}"
    assert parsed("qwen_coder", two) == ("", [("weather", PARIS), ("now", "{}")])


def test_a_function_tag_that_names_no_tool_is_text() -> None:
    text = "Write <function=other> or <function= or <function=weather <function"
    assert parsed("qwen_coder", text) == (text, [])


def test_a_call_that_is_not_closed_ends_with_its_section() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>\nDone."
    assert parsed("qwen_coder", text) == ("\nDone.", [("weather", PARIS)])


FILES = {
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {}, "mode": {"type": "integer"}}}
}
QWEN = "<tool_call>\n<function=write>\n{}\n</function>\n</tool_call>"
GLM = "<tool_call>write\n{}\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="write">\n{}\n</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("qwen_coder", QWEN.format("<parameter=path>\na\n<parameter=mode>\n7"), '{"path": "a", "mode": 7}'),
        ("qwen_coder", QWEN.format("<parameter=mode>7<parameter=path>a"), '{"mode": 7, "path": "a"}'),
        ("qwen_coder", "<tool_call><function=write><parameter=path>a</function>", '{"path": "a"}'),
        ("qwen_coder", "<tool_call><function=write><parameter=path>\na\n</tool_call>", '{"path": "a"}'),
        ("qwen_coder", "<function=write><parameter=path>\na\n</tool_call>\n", '{"path": "a"}'),
        (
            "glm45",
            GLM.format("<arg_key>path</arg_key>\n<arg_value>a<arg_key>mode</arg_key>\n<arg_value>7"),
            '{"path": "a", "mode": 7}',
        ),
        (
            "minimax_m2",
            MINIMAX.format('<parameter name="path">a\n<parameter name="mode">7'),
            '{"path": "a", "mode": 7}',
        ),
    ],
)
def test_a_value_that_is_not_closed_ends_where_the_call_goes_on(parser: str, text: str, arguments: str) -> None:
    assert parsed(parser, text, FILES) == ("", [("write", arguments)])
    twice = f"{text}\n{text}"
    assert parsed(parser, twice, FILES) == ("", [("write", arguments)] * 2)


@pytest.mark.parametrize(
    "value",
    [
        "see </function> and </tool_call> in it",
        "<parameter=other> is none of the tool's",
        "<parameter= <parameter=path",
        "</function>\n</function >",
        "</function>" + " " * 600 + "</tool_call>",
        "<parameter=" + "x" * 600 + ">",
        "</function>\n<functions>",
    ],
)
def test_tags_that_go_on_with_no_call_are_part_of_a_value(value: str) -> None:
    text = QWEN.format(f"<parameter=path>\n{value}\n</parameter>")
    assert parsed("qwen_coder", text, FILES) == ("", [("write", json.dumps({"path": value}))])


def test_kimis_section_is_also_named_in_the_singular() -> None:
    text = (
        "<|tool_call_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_call_section_end|>"
    )
    assert parsed("kimi_k2", text) == ("", [("weather", PARIS)])


@pytest.mark.parametrize("between", ["\n", "; ", " ", ""])
def test_llamas_calls_follow_each_other_by_any_separator(between: str) -> None:
    text = f'{{"name": "weather", "parameters": {PARIS}}}{between}{{"name": "now", "parameters": {{}}}}'
    assert parsed("llama", text) == ("", [("weather", PARIS), ("now", "{}")])


def test_null_is_no_arguments() -> None:
    for order in ('"name": "now", "arguments": null', '"arguments": null, "name": "now"'):
        assert parsed("qwen", f"<tool_call>{{{order}}}</tool_call>") == ("", [("now", "{}")])


def test_python_values_are_read_and_keep_their_capitals() -> None:
    value = "{'Name': 'Ab', 'Known': True, \"Other\": None}"
    text = f"<tool_call>\n<function=weather>\n<parameter=where>\n{value}\n</parameter>\n</function>\n</tool_call>"
    arguments = '{"where": {"Name": "Ab", "Known": true, "Other": null}}'
    assert parsed("qwen_coder", text) == ("", [("weather", arguments)])


@pytest.mark.parametrize("schema", [{"anyOf": 5}, {"oneOf": None}, {"enum": 5}, {"type": 5}, {"type": [[]]}, 5, None])
def test_a_schema_that_is_none_says_nothing_of_a_value(schema: Any) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    for properties in ({"a": schema}, schema):
        tools = {"f": {"type": "object", "properties": properties}}
        assert parsed("qwen_coder", text, tools) == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.x:{}x<|tool_call_argument_begin|>{{}}"),
        ("kimi_k2", "<|tool_call_begin|>{}x<|tool_call_argument_begin|>{{}}"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}x{{"),
        ("glm45", "<tool_call>{}x<arg_key>"),
        ("mistral", "[TOOL_CALLS]{}x[ARGS]"),
        ("pythonic", "[{}x"),
        ("gpt_oss", "<|channel|>commentary to={}<|message|>"),
    ],
)
def test_white_space_in_a_name_does_not_cost_its_square(parser: str, text: str) -> None:
    machine = parsers_named(None, parser, "").machine(Tools(NAMES), True, "", None)
    assert machine is not None
    # A square of this would take hours.
    Parsed().add(machine.feed(text.format(" " * 2_000_000))).add(machine.close())


def test_a_name_that_is_a_deep_list_is_no_name() -> None:
    text = '<tool_call>{"name": ' + "[" * 100_000 + "</tool_call>"
    assert parsed("qwen", text)[1] == []
    closed = '<tool_call>{"name": ' + "[" * 5000 + "]" * 5000 + ', "arguments": {}}</tool_call>'
    assert parsed("qwen", closed) == (closed, [])
