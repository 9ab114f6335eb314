# SPDX-License-Identifier: MIT
"""The bytes of answers in Anthropic's Messages API, whole or as its sequence of named events.

An answer is a list of blocks: thinking, text, tool_use. A stream opens a block, adds to it and stops it before the next
one opens. Its events follow Anthropic's public API reference (Messages, streaming).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenspeed.gateway.chat.choice import Piece
from tokenspeed.gateway.chat.format import CountTokens, Head, PromptScore, Usage, encode_json
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.text.parse.events import CallArguments, CallStart, Event, Text, Thought

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesFormat:
    """One answer; there is one choice."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._open = ""
        self._num_blocks = 0
        self._end: dict[str, Any] = {}

    def opening(self, choice: int, count: CountTokens) -> bytes:
        """`message_start`, with what is known of the prompt."""
        message = self._message([], None, None, _usage(count(), 0))
        return _event("message_start", {"message": message}) + _event("ping", {})

    def score_prompt(self, prompt: int, scores: Sequence[PromptScore]) -> None:
        """This API has no logprobs; nobody asks for them."""

    def events(self, choice: int, piece: Piece, count: CountTokens) -> bytes:
        """Blocks of the piece; the end is only noted, because `ending` tells it with the final count."""
        out = b"".join([self._block_events(event) for event in piece.meaning])
        if piece.finish:
            reason, sequence = _stop(piece)
            self._end = {"stop_reason": reason, "stop_sequence": sequence}
            out += self._close_block()
        return out

    def ending(self, count: CountTokens) -> bytes:
        """`message_delta` with the reason and the count, and `message_stop`."""
        usage = count()
        delta = {"delta": self._end, "usage": _usage(usage, usage.completion_tokens)}
        return _event("message_delta", delta) + _event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        """An `error` event, which ends the stream."""
        return b"event: error\ndata: " + messages_error(error) + b"\n\n"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The answer in one body."""
        (piece,) = pieces
        reason, sequence = _stop(piece)
        return encode_json(self._message(_blocks(piece), reason, sequence, _usage(usage, usage.completion_tokens)))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _block_events(self, event: Event) -> bytes:
        match event:
            case Text(text):
                block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
            case Thought(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": text}
            case CallStart(_, name, call_id):
                block = {"type": "tool_use", "id": call_id or "", "name": name, "input": {}}  # type: ignore[dict-item]
                return self._close_block() + self._open_block(block)
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
        opened = b"" if self._open == block["type"] else self._close_block() + self._open_block(block)
        return opened + self._delta(delta)

    def _open_block(self, block: dict[str, Any]) -> bytes:
        self._open = block["type"]
        return _event("content_block_start", {"index": self._num_blocks, "content_block": block})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        # Thinking is signed by whoever made it; nobody checks ours, but clients wait for the field.
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        self._num_blocks += 1
        return signed + _event("content_block_stop", {"index": self._num_blocks - 1})


def messages_error(error: ApiError) -> bytes:
    """The body of an error as Anthropic's clients read it."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return encode_json({"type": "error", "error": fields})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode_json({"type": name, **fields}) + b"\n\n"


def _usage(usage: Usage, num_output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": num_output_tokens,
    }


def _stop(piece: Piece) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if piece.finish == "stop" and isinstance(piece.matched, str):
        return "stop_sequence", piece.matched
    return _STOP_REASONS.get(piece.finish, "end_turn"), None


def _blocks(piece: Piece) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for event in piece.meaning:
        last = blocks[-1] if blocks else {"type": ""}
        match event:
            case Text(text) if last["type"] == "text":
                last["text"] += text
            case Text(text):
                blocks.append({"type": "text", "text": text})
            case Thought(text) if last["type"] == "thinking":
                last["thinking"] += text
            case Thought(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": ""})
            case CallStart(_, name, call_id):
                arguments[len(blocks)] = ""
                blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                arguments[len(blocks) - 1] += text
    for i, text in arguments.items():
        blocks[i]["input"] = _input(text)
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; text that is none (the answer was cut) is kept under a name of its own."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {"_incomplete_json": arguments}
    return value if isinstance(value, dict) else {"_value": value}
