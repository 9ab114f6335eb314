# SPDX-License-Identifier: MIT
"""The bytes of a response, whole or as the Responses API's sequence of events.

The output is a list of items (reasoning, message, function_call), each opened, filled and closed by events of its own.
The response object is built on the way and handed to `store` at its end, whichever way the client reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenspeed.gateway.chat.choice import Piece
from tokenspeed.gateway.chat.format import CountTokens, PromptScore, Usage, encode_json
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.responses.items import Item, new_id
from tokenspeed.gateway.text.parse.events import CallArguments, CallStart, Event, Text, Thought

Store = Callable[[dict[str, Any]], None]


class ResponsesFormat:
    """One response. `body`: the object as it is at its start, without output."""

    def __init__(self, body: dict[str, Any], store: Store) -> None:
        self.body = body
        self._store = store
        self._number = 0
        self._items: list[Item] = []
        self._open: Item | None = None

    def opening(self, choice: int, count: CountTokens) -> bytes:
        """The response exists, and is being worked on."""
        self.body["status"] = "in_progress"
        return self._event("response.created", response=self.body) + self._event(
            "response.in_progress", response=self.body
        )

    def score_prompt(self, prompt: int, scores: Sequence[PromptScore]) -> None:
        """This API has no logprobs of prompts; nobody asks for them."""

    def events(self, choice: int, piece: Piece, count: CountTokens) -> bytes:
        """Deltas of the piece; the end is told by `ending`."""
        out = b"".join([self._take(event) for event in piece.meaning])
        if piece.finish:
            self._note_finish(piece.finish)
            out += self._close()
        return out

    def ending(self, count: CountTokens) -> bytes:
        """The whole response."""
        body = self._finished(count())
        return self._event(f"response.{body['status']}", response=body)

    def failure(self, error: ApiError) -> bytes:
        """The response failed; what there is of it is told."""
        body = self.failed(error)
        return self._event("response.failed", response=body)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The answer in one body."""
        (piece,) = pieces
        for event in piece.meaning:
            self._take(event)
        self._note_finish(piece.finish)
        self._close()
        return encode_json(self._finished(usage))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response as it ends after a fault, stored."""
        self._close()
        status = "cancelled" if error.code == "cancelled" else "failed"
        fault = None if status == "cancelled" else {"code": error.code, "message": error.message}
        self.body |= {"status": status, "error": fault, "output": self._items}
        self._store(self.body)
        return self.body

    def _finished(self, usage: Usage) -> dict[str, Any]:
        self.body["output"] = self._items
        self.body["completed_at"] = int(time.time())
        self.body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        self._store(self.body)
        return self.body

    def _note_finish(self, finish: str) -> None:
        self.body["status"] = "incomplete" if finish == "length" else "completed"
        if finish == "length":
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
            if self._open is not None:
                self._open["status"] = "incomplete"

    def _take(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self._in_item("message") + self._add_text("output_text", text)
            case Thought(text):
                return self._in_item("reasoning") + self._add_text("reasoning_text", text)
            case CallStart(_, name, call_id):
                call = {"call_id": call_id, "name": name, "arguments": ""}
                return self._close() + self._open_item("function_call", "fc", call)
            case CallArguments(_, text):
                assert self._open is not None
                self._open["arguments"] += text
                return self._event(
                    "response.function_call_arguments.delta",
                    item_id=self._open["id"],
                    output_index=self._index,
                    delta=text,
                )

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _in_item(self, kind: str) -> bytes:
        """The events that lead to an open item of this kind with its one part."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        out = self._close()
        if kind == "message":
            out += self._open_item(kind, "msg", {"role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            out += self._open_item(kind, "rs", {"summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
        assert self._open is not None
        out += self._part_event("response.content_part.added", part=part)
        self._open["content"].append(part)
        return out

    def _open_item(self, kind: str, prefix: str, fields: dict[str, Any]) -> bytes:
        item: Item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _add_text(self, part_type: str, text: str) -> bytes:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if part_type == "output_text" else {}
        return self._part_event(f"response.{part_type}.delta", delta=text, **extra)

    def _close(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        out = b""
        if item["type"] == "function_call":
            out += self._event(
                "response.function_call_arguments.done",
                item_id=item["id"],
                output_index=self._index,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            out += self._part_event(f"response.{part['type']}.done", text=part["text"], **extra)
            out += self._part_event("response.content_part.done", part=part)
        if item["status"] == "in_progress":
            item["status"] = "completed"
        out += self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None
        return out

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._index, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = encode_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
