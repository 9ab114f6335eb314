# SPDX-License-Identifier: MIT
"""A model's chat template: messages to the prompt's text, in Jinja's sandbox.

Rendered with the environment that the templates were written for (the one of Hugging Face's `transformers`): blocks
trimmed, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, loop controls, the `generation` block. A
template comes with the model or from the operator; the messages come from anybody, so nothing here may run code.
One that keeps lists of its own may change them (Kimi's has a queue of the calls that await their results), but nothing
that it is given.
Whatever a template objects to is the caller's fault: `TemplateError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

Message = Mapping[str, Any]

_CHANGING = frozenset(
    {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "setdefault", "sort", "update"}
)
"""Methods that change a list or a dictionary."""


class _GivenList(list[Any]):
    """A list that the template did not make."""


class _GivenDict(dict[str, Any]):
    """A dictionary that the template did not make."""


def _given(value: Any) -> Any:
    """`value` with its lists and dictionaries marked, in copies."""
    if isinstance(value, Mapping):
        return _GivenDict({key: _given(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _GivenList(map(_given, value))
    return value


class TemplateError(ValueError):
    """Messages that the template refuses, or a template that cannot be compiled; the message says why."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for trainers; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are Jinja's

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _KeepingLists(ImmutableSandboxedEnvironment):
    """For templates that change lists: those of their own, which are no `_GivenList`."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        if type(obj) in (list, dict) and attr in _CHANGING:
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)


def _environment(keeps_lists: bool) -> SandboxedEnvironment:
    kind = _KeepingLists if keeps_lists else ImmutableSandboxedEnvironment
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. `special_tokens` are variables such as `bos_token` that it may write.

    `tools` tells whether the template shows tools, `parts` whether it reads message contents as lists of parts; if
    not, text parts are joined with newlines before it sees them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(special_tokens)
        try:
            tree = _environment(False).parse(source)
            self._keeps_lists = any(attribute.attr in _CHANGING for attribute in tree.find_all(nodes.Getattr))
            self._template = _environment(self._keeps_lists).from_string(source)
            # They come as a chain of dictionaries, which every rendering would walk.
            self._template.globals = dict(self._template.globals)
            self.parts = _reads_parts(tree)
            self.tools = "tools" in meta.find_undeclared_variables(tree)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` are the caller's (`chat_template_kwargs`). Raises `TemplateError`."""
        shown = messages if self.parts else [_flattened(message) for message in messages]
        given = {
            **self._variables,
            **(variables or {}),
            "messages": shown,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(_given(given) if self._keeps_lists else given)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses the messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            # What Python operators inside a template raise on values that it does not expect, or nested too deep.
            raise TemplateError(f"the chat template cannot show the messages: {error}") from None


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether some loop of the template runs over a message's content."""
    return any(_names_content(loop.iter) for loop in tree.find_all(nodes.For))


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _flattened(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}
