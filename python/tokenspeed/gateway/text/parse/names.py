# SPDX-License-Identifier: MIT
"""Which machines a parser's name stands for. Names are those of the released gateway, with their aliases.

A name that is known but has no machine is refused at start with the list of those that have one, as an unknown one is.
`auto` chooses by the markers that the model's chat template writes, so a fine-tune that keeps its template keeps its
parser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tokenspeed.gateway.text.kept_reasoning import ThinkMarkers
from tokenspeed.gateway.text.parse import marked_calls, object_calls, xml_calls
from tokenspeed.gateway.text.parse.harmony import Harmony
from tokenspeed.gateway.text.parse.marked_calls import MARKED_TOKENS, MarkedCalls, MarkedFormat
from tokenspeed.gateway.text.parse.mistral import MistralCalls
from tokenspeed.gateway.text.parse.object_calls import ObjectCalls, ObjectFormat
from tokenspeed.gateway.text.parse.output import Chained, Plain, TextMachine
from tokenspeed.gateway.text.parse.pythonic import PythonicCalls
from tokenspeed.gateway.text.parse.reasoning import ReasoningFormat, ReasoningSplitter
from tokenspeed.gateway.text.parse.tools import Tools
from tokenspeed.gateway.text.parse.xml_calls import XmlCalls, XmlFormat

MakeToolParser = Callable[[Tools], TextMachine]


class UnknownParser(ValueError):
    """A name without a machine; the message lists those that have one."""


def _think(opens: bool, *also_ends: str) -> ReasoningFormat:
    return ReasoningFormat("<think>", "</think>", opens, also_ends)


_BASE = _think(False)
_ALWAYS = _think(True)
_KIMI = _think(False, "<|tool_calls_section_begin|>")
_REASONING: Mapping[str, ReasoningFormat | None] = {
    "base": _BASE,
    "deepseek_r1": _ALWAYS,
    "deepseek_v3": _BASE,
    "deepseek_v3.1": _BASE,
    "deepseek_v3.2": _think(False, "<｜DSML｜function_calls>"),
    "qwen3": _BASE,
    "qwen3_thinking": _ALWAYS,
    "kimi_k2": _KIMI,
    "kimi_k25": _KIMI,
    "kimi_thinking": _think(True, "<|tool_calls_section_begin|>"),
    "glm45": _BASE,
    "minimax_m2": _think(True, "<minimax:tool_call>"),
    "step3": _ALWAYS,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", False, ()),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", False, ()),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷", False, ()),
    "llama_nemotron": _BASE,
    "nano_v3": _BASE,
    "olmo3": _ALWAYS,
    "passthrough": None,
}
_REASONING_ALIASES = {
    "deepseek_v31": "deepseek_v3.1",
    "glm": "glm45",
    "glm4": "glm45",
    "minimax": "minimax_m2",
    "mistral_v13": "mistral",
    "plain": "passthrough",
    "json": "passthrough",
    "qwen2.5": "passthrough",
    "llama4": "passthrough",
    "llama4_pythonic": "passthrough",
    "gpt-oss": "gpt_oss",
    "gptoss": "gpt_oss",
    "harmony": "gpt_oss",
}


def _objects(form: ObjectFormat) -> MakeToolParser:
    return lambda tools: ObjectCalls(tools, form)


def _marked(form: MarkedFormat) -> MakeToolParser:
    return lambda tools: MarkedCalls(tools, form)


def _xml(form: XmlFormat) -> MakeToolParser:
    return lambda tools: XmlCalls(tools, form)


_TOOLS: Mapping[str, MakeToolParser] = {
    "qwen": _objects(object_calls.HERMES),
    "qwen_coder": _xml(xml_calls.QWEN_CODER),
    "deepseek_v3": _marked(marked_calls.DEEPSEEK_V3),
    "deepseek_v3.1": _marked(marked_calls.DEEPSEEK_V31),
    "deepseek_v3.2": _xml(xml_calls.DEEPSEEK_V32),
    "kimi_k2": _marked(marked_calls.KIMI_K2),
    "glm45": _xml(xml_calls.GLM45),
    "minimax_m2": _xml(xml_calls.MINIMAX_M2),
    "mistral": MistralCalls,
    "llama": _objects(object_calls.LLAMA3),
    "pythonic": PythonicCalls,
    "json": _objects(object_calls.BARE),
    "seed_oss": _xml(xml_calls.SEED_OSS),
    "passthrough": lambda tools: Plain(),
}
_TOOL_ALIASES = {
    "hermes": "qwen",
    "qwen2.5": "qwen",
    "qwen3": "qwen",
    "hf": "qwen",
    "qwen_xml": "qwen_coder",
    "qwen3_coder": "qwen_coder",
    "nemotron": "qwen_coder",
    "deepseek": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseek31": "deepseek_v3.1",
    "deepseek_v31": "deepseek_v3.1",
    "deepseekv31": "deepseek_v3.1",
    "deepseek32": "deepseek_v3.2",
    "deepseekv32": "deepseek_v3.2",
    "kimik2": "kimi_k2",
    "kimi_k25": "kimi_k2",
    "glm": "glm45",
    "glm4": "glm45",
    "glm45_moe": "glm45",
    "glm47_moe": "glm45",
    "minimax-m2": "minimax_m2",
    "mistral_v13": "mistral",
    "llama3": "llama",
    "llama3_json": "llama",
    "llama4": "pythonic",
    "llama4_pythonic": "pythonic",
    "plain": "passthrough",
    "gpt-oss": "gpt_oss",
    "gptoss": "gpt_oss",
    "harmony": "gpt_oss",
}
_HARMONY = "gpt_oss"

MARKER_TOKENS = frozenset(
    {
        *Harmony.MARKERS,
        *(marker for form in _REASONING.values() if form for marker in (form.open, form.close)),
        *MARKED_TOKENS,
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "｜DSML｜",
    }
)
"""Tokens that stay in the text for the machines although a tokenizer calls them special."""


def reasoning_end(name: str) -> str | None:
    """The marker that closes the reasoning of the parser `name`; None when it has none, or is unknown."""
    form = _REASONING.get(_REASONING_ALIASES.get(name, name))
    return None if form is None else form.close


REASONING_NAMES = tuple(sorted({*_REASONING, *_REASONING_ALIASES, _HARMONY}))
TOOL_NAMES = tuple(sorted({*_TOOLS, *_TOOL_ALIASES, _HARMONY}))


@dataclass(frozen=True)
class Parsers:
    """The machines of a model by name. None: this part of the text is not looked at."""

    reasoning: str | None
    tools: str | None

    def or_tools(self, name: str) -> Parsers:
        """These, with the tool parser `name` where there is none."""
        return self if self.tools is not None else replace(self, tools=name)

    @property
    def think_markers(self) -> ThinkMarkers | None:
        """What begins and ends reasoning; None for a model without, or with channels instead."""
        form = _REASONING.get(self.reasoning or "")
        return None if form is None else ThinkMarkers(form.open, form.close)

    def open_end(self, prompt: str, continued: str | None) -> str | None:
        """The marker that ends the reasoning that the prompt has left open; None when an answer begins at once. Where
        it is open, a constraint on the answer begins behind that marker."""
        form = _REASONING.get(self.reasoning or "")
        return form.close if form is not None and form.starts_open(prompt, continued) else None

    def forced(self, tools: Tools, separate_reasoning: bool, prompt: str, continued: str | None) -> TextMachine:
        """The machine of a choice that a grammar forces to be calls: bare JSON, whatever the model's own format."""
        form = _REASONING.get(self.reasoning or "")
        calls = ObjectCalls(tools, object_calls.BARE)
        if form is None or not separate_reasoning or not form.starts_open(prompt, continued):
            return calls
        return Chained(ReasoningSplitter(form, True), calls)

    def machine(
        self, tools: Tools | None, separate_reasoning: bool, prompt: str, continued: str | None
    ) -> TextMachine | None:
        """The machine of one choice, or None when all text is content. tools: None when the request has none that may
        be called. prompt, continued: as for `ReasoningFormat.starts_open`."""
        if _HARMONY in (self.reasoning, self.tools):
            return Harmony(tools)
        second = _TOOLS[self.tools](tools) if self.tools is not None and tools is not None else None
        form = _REASONING[self.reasoning] if self.reasoning is not None and separate_reasoning else None
        if form is None:
            return second
        return Chained(ReasoningSplitter(form, form.starts_open(prompt, continued)), second or Plain())


def parsers_named(reasoning: str | None, tools: str | None, template: str) -> Parsers:
    """Resolve names; "auto" by the template. Raises `UnknownParser`."""
    return Parsers(
        _resolve(reasoning, _REASONING_ALIASES, {*_REASONING, _HARMONY}, "reasoning", template),
        _resolve(tools, _TOOL_ALIASES, {*_TOOLS, _HARMONY}, "tool", template),
    )


def _resolve(name: str | None, aliases: Mapping[str, str], known: set[str], what: str, template: str) -> str | None:
    if name is None or name == "none":
        return None
    if name == "auto":
        return _guess(template, what)
    resolved = aliases.get(name, name)
    if resolved not in known:
        names = ", ".join(REASONING_NAMES if what == "reasoning" else TOOL_NAMES)
        raise UnknownParser(f"there is no {what} parser named {name}; choose one of auto, none, {names}")
    return resolved


_TEMPLATE_SIGNS: tuple[tuple[str, str, str | None], ...] = (
    # (what the template contains, tool parser, reasoning parser); the first that fits counts.
    ("<|channel|>", _HARMONY, _HARMONY),
    ("<｜DSML｜", "deepseek_v3.2", "deepseek_v3.2"),
    ("```json", "deepseek_v3", None),
    ("<｜tool▁sep｜>", "deepseek_v3.1", "deepseek_v3.1"),
    ("<|tool_call_argument_begin|>", "kimi_k2", "kimi_k2"),
    ("<arg_key>", "glm45", "glm45"),
    ("<minimax:tool_call>", "minimax_m2", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss", "seed_oss"),
    ("<function=", "qwen_coder", None),
    ("[TOOL_CALLS]", "mistral", None),
    ("<tool_call>", "qwen", None),
    ("<|python_start|>", "pythonic", None),
    ("<|python_tag|>", "llama", None),
    ('{"name": function name, "parameters"', "llama", None),
)


def _guess(template: str, what: str) -> str | None:
    signs = _TEMPLATE_SIGNS
    found = next(((tools, reasoning) for sign, tools, reasoning in signs if _has(template, sign)), (None, None))
    if what == "tool":
        return found[0]
    if found[1] is not None:
        return found[1]
    if "[THINK]" in template:
        return "mistral"
    return "base" if "<think>" in template or "</think>" in template else None


def _has(template: str, sign: str) -> bool:
    # DeepSeek's V3 fences its arguments; others mention JSON fences in their instructions only.
    return sign in template and (sign != "```json" or "<｜tool▁sep｜>" in template)
