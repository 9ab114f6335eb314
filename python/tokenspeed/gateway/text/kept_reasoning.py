# SPDX-License-Identifier: MIT
"""Rendering a conversation so that earlier reasoning stays in the prompt, whatever the template does with it.

Many templates show the reasoning of the turn that goes on and drop that of earlier ones, so that a prompt no longer
begins with the one before it and an agent's cached prefix is lost with every turn. Which messages lose theirs is found
by rendering with marks in place of texts; there the block is put back in the form that the template itself gives to
the reasoning of a last turn, or, if it never shows any, in the usual form.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.gateway.text.template import TemplateError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class ThinkMarkers:
    """What begins and ends a block of reasoning."""

    open: str
    close: str


def render_keeping(messages: Sequence[Message], markers: ThinkMarkers, render: Render) -> str:
    """The prompt's text. `render` is the template's. Raises `TemplateError`."""
    nonce = secrets.token_hex(8)
    thinking = [i for i, message in enumerate(messages) if _thought(message)]
    marked = _with(messages, {i: {"content": _mark("s", i, nonce), "thought": _mark("r", i, nonce)} for i in thinking})
    try:
        shown = render(marked) if thinking else ""
    except TemplateError:
        return render(messages)  # which says what is wrong, or takes what marks are not
    dropped = [i for i in thinking if _mark("r", i, nonce) not in shown and _mark("s", i, nonce) in shown]
    if not dropped:
        return render(messages)
    text = render(_with(messages, {i: {"content": _mark("s", i, nonce)} for i in dropped}))
    begin, end = _form(markers, nonce, render)
    for i in dropped:
        content = str(messages[i].get("content") or "").lstrip("\n")
        block = f"{begin}{_thought(messages[i]).strip()}{end}{content}"
        text = _put(text, _mark("s", i, nonce), block, markers, not content)
    return text


def _put(text: str, mark: str, block: str, markers: ThinkMarkers, alone: bool) -> str:
    """`block` in place of `mark` and of an empty block before it. `alone`: no content follows, so that the line break
    which a template puts behind a content is none of the model's."""
    opened, closed = re.escape(markers.open), re.escape(markers.close)
    pattern = rf"(?:(?:{opened}\s*)?{closed}\s*)?{re.escape(mark)}" + (r"\n?" if alone else "")
    return re.sub(pattern, lambda _: block, text)


def _form(markers: ThinkMarkers, nonce: str, render: Render) -> tuple[str, str]:
    """What stands before and behind the reasoning of a last turn."""
    thought, content = _mark("r", "", nonce), _mark("s", "", nonce)
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "reasoning_content": thought}]
    usual = f"{markers.open}\n", f"\n{markers.close}\n\n"
    try:
        shown = render(turn)
    except TemplateError:
        return usual
    found = re.search(rf"({re.escape(markers.open)}\s*){thought}(.*?){content}", shown, re.DOTALL)
    return (found[1], found[2]) if found is not None else usual


def _thought(message: Message) -> str:
    """The reasoning that a client sends back; empty where there is none, or no text beside it."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    plain = isinstance(message.get("content"), str | None)
    return thought if message.get("role") == "assistant" and isinstance(thought, str) and plain else ""


def _with(messages: Sequence[Message], changes: Mapping[int, Mapping[str, str]]) -> list[Message]:
    out: list[Message] = list(messages)
    for i, change in changes.items():
        message = {**messages[i], "content": change["content"]}
        if "thought" in change:
            message |= {name: change["thought"] for name in ("reasoning_content", "reasoning") if message.get(name)}
        out[i] = message
    return out


def _mark(kind: str, number: object, nonce: str) -> str:
    return f"\ue000{kind}{number}-{nonce}\ue001"
