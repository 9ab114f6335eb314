# SPDX-License-Identifier: MIT
"""Every format's transcripts, fed whole, by character, at every pair of cuts and by tokens, give the same result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tokenspeed.gateway.text.parse.events import CallArguments, CallStart, Parsed
from tokenspeed.gateway.text.parse.names import (
    REASONING_NAMES,
    TOOL_NAMES,
    Parsers,
    UnknownParser,
    parsers_named,
)
from tokenspeed.gateway.text.parse.output import TextMachine
from tokenspeed.gateway.text.parse.tools import Tools

TOOLS = Tools(
    {
        "get_weather": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
        },
        "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        "now": {"type": "object", "properties": {}},
        "any": {},
    }
)
Make = Callable[[], TextMachine]


def by(tools: str | None, reasoning: str | None = None, prompt: str = "", continued: str | None = None) -> Make:
    def make() -> TextMachine:
        machine = parsers_named(reasoning, tools, "").machine(TOOLS, True, prompt, continued)
        assert machine is not None
        return machine

    return make


def feed(make: Make, pieces: list[str]) -> Parsed:
    machine, parsed = make(), Parsed()
    for piece in pieces:
        parsed.add(machine.feed(piece))
    return parsed.add(machine.close())


def under_every_cut(make: Make, text: str) -> Parsed:
    """The joined result, which must not depend on the cuts."""
    whole = feed(make, [text])
    assert feed(make, list(text)) == whole
    assert feed(make, re.findall(r"\s?\w+|\W", text)) == whole
    for first in range(len(text)):
        for second in range(first, len(text), 1 if len(text) < 120 else 7):
            assert feed(make, [text[:first], text[first:second], text[second:]]) == whole, (first, second)
    return whole


def calls(parsed: Parsed) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


PARIS = ("get_weather", {"city": "Paris", "days": 2})
ROME = ("get_weather", {"city": "Rome"})

HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
TWO_CALLS = {
    "qwen": "Let me see.\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
    '\n<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_weather"}\n</tool_call>',
    "qwen_coder": "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
    "<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n'
    '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v3.1": 'Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", '
    '"days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_v3.2": 'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
    'name="city" string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2'
    '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>'
    'functions.get_weather:1<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
    "glm45": "Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
    "<arg_value>Rome</arg_value>\n</tool_call>",
    "minimax_m2": 'Let me see.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
    '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_weather">\n'
    '<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": '
    '"get_weather", "arguments": {"city": "Rome"}}]',
    "mistral_v13": 'Let me see.[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]'
    'get_weather[ARGS]{"city": "Rome"}',
    "llama": 'Let me see.\n<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
    '{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "gpt_oss": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions."
    'get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|><|start|>assistant to=functions.'
    'get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
    "seed_oss": "Let me see.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call><seed:tool_call>\n<function=get_weather>\n"
    "<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
}


@pytest.mark.parametrize("name", TWO_CALLS)
def test_content_and_two_calls_come_out_the_same_under_every_cut(name: str) -> None:
    parsed = under_every_cut(by(name), TWO_CALLS[name])
    assert parsed.text == "Let me see."
    assert calls(parsed) == [PARIS, ROME]


@pytest.mark.parametrize("name", TWO_CALLS)
def test_a_call_cut_off_anywhere_never_fails_and_keeps_what_came(name: str) -> None:
    text = TWO_CALLS[name]
    for end in range(len(text)):
        parsed = feed(by(name), [text[:end]])
        assert parsed == feed(by(name), list(text[:end]))
        assert len(parsed.calls) <= 2


@pytest.mark.parametrize("name", sorted(set(TWO_CALLS) - {"gpt_oss"}))
def test_a_call_of_an_unknown_tool_is_shown_as_text(name: str) -> None:
    text = TWO_CALLS[name].replace("get_weather", "launch_rocket")
    parsed = under_every_cut(by(name), text)
    assert parsed.calls == []
    assert "launch_rocket" in parsed.text
    assert parsed.text.startswith("Let me see.")


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_a_model_that_writes_white_space_for_ever_inside_a_call_costs_no_more_than_its_length(name: str) -> None:
    # With the square of it, this test would run for minutes.
    for start in ("<tool_call>", "<tool_call>\n<function=get_weather>", "[", "<tool_call>get_weather\n"):
        spaces = " " * 60_000
        assert feed(by(name), [start, spaces, "<"]) == feed(by(name), [start + spaces + "<"])


@pytest.mark.parametrize("name", sorted(set(TWO_CALLS) - {"gpt_oss"}))
def test_text_without_calls_passes_untouched(name: str) -> None:
    text = "Use a < b, f([1, 2]) and \n\n  {braces}. <tool_cal [TOOL <｜tool 5 > 3 \n"
    assert under_every_cut(by(name), text) == Parsed(text=text)


def test_pythonic_lists_are_read_as_literals() -> None:
    text = "[get_weather(city='Pa\\'ris (F)', days=2), any(x={'a': [1, true, None]}), now()]"
    parsed = under_every_cut(by("pythonic"), text)
    assert parsed.text == ""
    expected = [("get_weather", {"city": "Pa'ris (F)", "days": 2}), ("any", {"x": {"a": [1, True, None]}}), ("now", {})]
    assert calls(parsed) == expected


def test_pythonic_calls_between_markers_and_by_position() -> None:
    parsed = under_every_cut(by("llama4"), '<|python_start|>[get_weather("Rome", 3)]<|python_end|>')
    assert calls(parsed) == [("get_weather", {"city": "Rome", "days": 3})]
    assert parsed.text == ""


@pytest.mark.parametrize(
    "text", ["[1] is a reference.", "[get_weather(city=Paris)]", "[get_weather(", "[open('x')]", "["]
)
def test_a_list_that_holds_no_calls_is_text(text: str) -> None:
    assert under_every_cut(by("pythonic"), text) == Parsed(text=text)


def test_llama_objects_stand_bare_at_the_start_only() -> None:
    text = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
    assert calls(under_every_cut(by("llama"), text)) == [ROME]
    assert under_every_cut(by("llama"), "So: " + text) == Parsed(text="So: " + text)
    other = '{"temperature": {"name": "x"}}'
    assert under_every_cut(by("llama"), other) == Parsed(text=other)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "a } ] { [ b", "days": 1}',
        '{"city": "quote \\" and \\\\", "x": [[], {}]}',
        '{"city": "\\u00e9\\ud83d\\ude00 Zürich 東京"}',
        '{"city": "</tool_call> inside", "deep": {"a": {"b": [1, {"c": null}]}}}',
        "{}",
    ],
)
def test_arguments_reach_the_client_as_they_were_written(arguments: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    parsed = under_every_cut(by("qwen"), text)
    assert [call.arguments for call in parsed.calls] == [arguments]
    assert parsed.text == ""


def test_a_raw_line_break_inside_a_string_is_escaped() -> None:
    parsed = feed(by("qwen"), ['<tool_call>{"name": "write", "arguments": {"text": "a\n\tb"}}</tool_call>'])
    assert calls(parsed) == [("write", {"text": "a\n\tb"})]


def test_arguments_given_as_a_string_are_unwrapped() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'
    assert calls(under_every_cut(by("qwen"), text)) == [ROME]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    for name, text in {
        "qwen": '<tool_call>{"name": "now"}</tool_call>',
        "qwen_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "glm45": "<tool_call>now\n</tool_call>",
        "deepseek_v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "gpt_oss": "<|channel|>commentary to=functions.now<|message|><|call|>",
    }.items():
        assert calls(under_every_cut(by(name), text)) == [("now", {})], name


def test_broken_json_after_the_name_ends_the_call_and_text_goes_on_behind_the_tag() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": <b>}}</tool_call> Sorry.'
    parsed = under_every_cut(by("qwen"), text)
    assert [call.name for call in parsed.calls] == ["now"]
    assert parsed.text == " Sorry."


def test_objects_that_are_no_calls_are_text() -> None:
    for text in (
        '<tool_call>{"a": 1}</tool_call>',
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 5}',
        "<tool_call>",
    ):
        assert under_every_cut(by("qwen"), text) == Parsed(text=text)


def test_string_parameters_stream_while_they_come() -> None:
    machine = by("qwen_coder")()
    machine.feed("<tool_call>\n<function=write>\n<parameter=text>\nline one\n")
    pieces = [event.text for event in machine.feed('say "hi" and ') if isinstance(event, CallArguments)]
    assert pieces == ['\\nsay \\"hi\\" and ']


def test_bare_parameters_take_the_type_of_the_schema() -> None:
    def argument(name: str, value: str) -> object:
        text = (
            f"<tool_call>\n<function=get_weather>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
        (call,) = calls(feed(by("qwen_coder"), [text]))
        return call[1][name]  # type: ignore[index]

    assert argument("city", "12") == "12"
    assert argument("days", "12") == 12
    assert argument("days", "twelve") == "twelve"
    assert argument("exact", "True") is True
    assert argument("unknown", '{"a": [1]}') == {"a": [1]}
    assert argument("unknown", "NaN") == "NaN"
    assert argument("city", "two\n\nlines\n") == "two\n\nlines\n"


def test_ids_written_by_the_model_are_kept() -> None:
    starts = [event for event in by("kimi_k2")().feed(TWO_CALLS["kimi_k2"]) if isinstance(event, CallStart)]
    assert [start.id for start in starts] == ["functions.get_weather:0", "functions.get_weather:1"]
    assert [start.index for start in starts] == [0, 1]


THINK = "<think>\nFirst,\n\nsecond.\n</think>\n\nThe answer."
REASONED = Parsed(text="The answer.", reasoning="First,\n\nsecond.")


@pytest.mark.parametrize(
    "name", ["base", "qwen3", "deepseek_r1", "glm45", "kimi_k25", "deepseek_v3.1", "llama_nemotron"]
)
def test_reasoning_is_split_off(name: str) -> None:
    assert under_every_cut(by(None, name), THINK) == REASONED


def test_reasoning_starts_in_the_state_of_the_rendered_prompt() -> None:
    rest = THINK.removeprefix("<think>\n")
    assert under_every_cut(by(None, "qwen3", "<|im_start|>assistant\n<think>\n"), rest) == REASONED
    assert under_every_cut(by(None, "deepseek_r1"), rest) == REASONED
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert under_every_cut(by(None, "deepseek_r1", closed), "Just text.") == Parsed(text="Just text.")
    assert under_every_cut(by(None, "qwen3"), "Just text.") == Parsed(text="Just text.")
    quoted = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert under_every_cut(by(None, "qwen3", quoted), "A tag.") == Parsed(text="A tag.")
    assert under_every_cut(by(None, "qwen3", "...", "<think>\nFirst,"), "second.</think>Yes.") == Parsed(
        "Yes.", "second."
    )


def test_unfinished_reasoning_is_all_reasoning() -> None:
    assert under_every_cut(by(None, "qwen3"), "<think>\nstill </thin") == Parsed(reasoning="still </thin")


def test_only_the_first_block_is_reasoning() -> None:
    text = "<think>a</think>Write <think>b</think>."
    assert under_every_cut(by(None, "qwen3"), text) == Parsed(text="Write <think>b</think>.", reasoning="a")


def test_a_call_right_after_the_reasoning() -> None:
    parsed = under_every_cut(by("qwen", "qwen3"), "<think>\nhm\n</think>\n" + HERMES)
    assert (parsed.reasoning, parsed.text, calls(parsed)) == ("hm", "", [PARIS])


def test_a_tool_section_ends_reasoning_that_was_left_open() -> None:
    text = "<think>hm " + TWO_CALLS["kimi_k2"].removeprefix("Let me see.")
    parsed = under_every_cut(by("kimi_k2", "kimi_k25"), text)
    assert (parsed.reasoning, parsed.text, calls(parsed)) == ("hm", "", [PARIS, ROME])


def test_harmony_tells_its_channels_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Think <b>hard</b>.<|end|><|start|>assistant<|channel|>final<|message|>"
        "The answer.<|return|>"
    )
    assert under_every_cut(by("gpt_oss", "gpt_oss"), text) == Parsed("The answer.", "Think <b>hard</b>.")


def test_a_list_of_calls_cut_off_anywhere_after_the_first_leaves_nothing_as_text() -> None:

    def make() -> TextMachine:
        return Parsers(None, None).forced(TOOLS, True, "", None)

    first, rest = '[{"name": "get_weather", "parameters": {"city": "Rome"}}', ', {"name": "now", "parameters": {}}]'
    for end in range(len(rest) + 1):
        for parsed in (feed(make, [first + rest[:end]]), feed(make, list(first + rest[:end]))):
            assert (parsed.calls[0].name, parsed.text) == ("get_weather", ""), rest[:end]


def test_forced_calls_are_read_as_bare_json() -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}, {"name": "now", "parameters": {}}]'
    thinking = Parsers("qwen3", "qwen")
    assert calls(under_every_cut(lambda: thinking.forced(TOOLS, True, "", None), text)) == [PARIS, ("now", {})]
    single = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    assert calls(under_every_cut(lambda: thinking.forced(TOOLS, True, "", None), single)) == [ROME]
    after = under_every_cut(
        lambda: thinking.forced(TOOLS, True, "assistant\n<think>\n", None), "[hm]\n</think>\n" + text
    )
    assert (after.reasoning, calls(after)) == ("[hm]", [PARIS, ("now", {})])


def test_every_name_makes_a_machine_and_unknown_ones_are_refused_with_the_list() -> None:
    for name in TOOL_NAMES:
        assert parsers_named(None, name, "").machine(TOOLS, True, "", None) is not None
    for name in REASONING_NAMES:
        parsers_named(name, None, "").machine(None, True, "", None)
    with pytest.raises(UnknownParser, match=r"no tool parser named muse; choose one of auto, none, .*qwen_coder"):
        parsers_named(None, "muse", "")
    with pytest.raises(UnknownParser, match=r"no reasoning parser named x; .*deepseek_r1"):
        parsers_named("x", None, "")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>\\n{{ tool }}</tool_call>", Parsers(None, "qwen")),
        ("<think> <tool_call> <function=", Parsers("base", "qwen_coder")),
        ("<|channel|>analysis", Parsers("gpt_oss", "gpt_oss")),
        ("[TOOL_CALLS] [THINK]", Parsers("mistral", "mistral")),
        ("{{ messages }}", Parsers(None, None)),
    ],
)
def test_auto_reads_the_template(template: str, expected: Parsers) -> None:
    assert parsers_named("auto", "auto", template) == expected
