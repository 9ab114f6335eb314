# SPDX-License-Identifier: MIT
"""The bytes of answers: OpenAI's chat and text completions, whole or as server-sent events.

A stream sends the same object for every token, so all of it but the text is encoded once a choice. A format knows
tokens only through `Piece`s; it owns no socket and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from tokenspeed.gateway.chat.choice import Piece, TokenLogprob
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.text.detokenizer import Detokenizer
from tokenspeed.gateway.text.parse.events import CallArguments, CallStart, Event, Parsed, Text, Thought
from tokenspeed.gateway.text.tokenizer import Tokenizer

encode_json = msgspec.json.Encoder().encode

_DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; cached ones are part of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_by_prompt: Sequence[int]
    reasoning_tokens: int | None
    """Part of the completion; None where no parser tells them apart."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached_by_prompt)

    def as_json(self) -> bytes:
        """OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return encode_json(usage)


class Head(msgspec.Struct, frozen=True):
    """What every object of one answer carries."""

    id: str
    created_s: int
    model: str


class UsageOptions(msgspec.Struct, frozen=True):
    """When a stream tells the count of tokens: at its end, and beside every event."""

    at_end: bool
    always: bool


CountTokens = Callable[[], Usage]


class PromptScore(msgspec.Struct, frozen=True):
    """A token of the prompt with its natural-log probability (None for the first) and the best alternatives."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Format(Protocol):
    """One API's way to write an answer. `count` gives the tokens so far; counting costs, so it is called at need."""

    def opening(self, choice: int, count: CountTokens) -> bytes:
        """Events before the first text of a choice."""

    def score_prompt(self, prompt: int, scores: Sequence[PromptScore]) -> None:
        """What the tokens of a prompt are worth; comes before the first text of its choices, where it was asked for."""

    def events(self, choice: int, piece: Piece, count: CountTokens) -> bytes:
        """Events for a piece."""

    def ending(self, count: CountTokens) -> bytes:
        """Events after all choices have ended."""

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream with an error."""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The answer in one body, a piece a choice."""


class _Base:
    """What both formats share: the pieces of an event around the part that changes."""

    chunk_object = ""
    whole_object = ""

    def __init__(self, head: Head, tokenizer: Tokenizer, usage: UsageOptions) -> None:
        self._usage = usage
        self._tokenizer = tokenizer
        self._returns_ids = False
        self._extra: dict[str, Any] = {}
        self._prompt_scores: dict[int, Sequence[PromptScore]] = {}
        self._created, self._id, self._model = head.created_s, head.id, head.model
        fields = {"id": head.id, "object": self.chunk_object, "created": head.created_s, "model": head.model}
        self._start = b"data: " + encode_json(fields)[:-1] + b',"choices":['
        # A client that asked for usage expects the key in every event.
        self._no_usage = b"]" + (b',"usage":null' if usage.at_end else b"") + b"}\n\n"

    def score_prompt(self, prompt: int, scores: Sequence[PromptScore]) -> None:
        """Kept until the prompt's choices are written."""
        self._prompt_scores[prompt] = scores

    def _prompt_logprobs(self, prompt: int) -> list[dict[str, Any] | None]:
        """As vLLM has it: a mapping a token from ids to their logprobs, the token's own first."""
        entries: list[dict[str, Any] | None] = []
        for score in self._prompt_scores.get(prompt, ()):
            if score.logprob is None:
                entries.append(None)
                continue
            ranks = {token: rank for rank, (token, _) in enumerate(score.top, 1)}
            values = {score.token_id: score.logprob} | dict(score.top)
            entries.append(
                {
                    str(token): {
                        "logprob": value,
                        "rank": ranks.get(token),
                        "decoded_token": self._tokenizer.token_text(token),
                    }
                    for token, value in values.items()
                }
            )
        return entries

    def _close(self, count: CountTokens) -> bytes:
        return b'],"usage":' + count().as_json() + b"}\n\n" if self._usage.always else self._no_usage

    def ending(self, count: CountTokens) -> bytes:
        """The event with no choices and the final count, if it was asked for, and the end."""
        return (self._start + b'],"usage":' + count().as_json() + b"}\n\n" if self._usage.at_end else b"") + _DONE

    def failure(self, error: ApiError) -> bytes:
        """The error as an event, and the end."""
        return b"data: " + error.body + b"\n\n" + _DONE

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The answer in one body."""
        body = {
            "id": self._id,
            "object": self.whole_object,
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(i, piece) for i, piece in enumerate(pieces)],
            "usage": msgspec.Raw(usage.as_json()),
            **self._extra,
            **self._of_prompt(),
        }
        return encode_json(body)

    def _of_prompt(self) -> dict[str, Any]:
        """What the whole answer says of its one prompt."""
        return {}

    def _has_delta(self, piece: Piece) -> bool:
        return bool(piece.text or piece.logprobs or (self._returns_ids and piece.token_ids))

    def _ids(self, piece: Piece) -> bytes:
        """The tail of a delta's choice that carries its token ids."""
        return b',"token_ids":' + encode_json(piece.token_ids) if self._returns_ids else b""

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormat(_Base):
    """`chat.completion` and `chat.completion.chunk`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        usage: UsageOptions,
        logprobs: bool,
        prompt_ids: Sequence[int] | None,
    ) -> None:
        """prompt_ids: the prompt's tokens where the client asked for token ids, else None."""
        super().__init__(head, tokenizer, usage)
        self._logprobs = logprobs
        self._returns_ids = prompt_ids is not None
        if prompt_ids is not None:
            self._extra = {"prompt_token_ids": prompt_ids}

    def _of_prompt(self) -> dict[str, Any]:
        return {"prompt_logprobs": self._prompt_logprobs(0)} if self._prompt_scores else {}

    def opening(self, choice: int, count: CountTokens) -> bytes:
        """The delta that names the role."""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % choice
        extra = encode_json(self._extra)[1:-1]
        return self._start + delta + (b"]," + extra + self._close(count)[1:] if extra else self._close(count))

    def events(self, choice: int, piece: Piece, count: CountTokens) -> bytes:
        """A content delta when there is any, and the finish event at the end."""
        out = b""
        if piece.events:
            first, *others = map(_delta_of, _merged(piece.events))
            out = self._delta(choice, first, piece, count)
            out += b"".join(self._delta(choice, delta, None, count) for delta in others)
        elif self._has_delta(piece):
            out = self._delta(choice, b'{"content":' + encode_json(piece.text) + b"}", piece, count)
        if piece.finish:
            finish = {
                "index": choice,
                "delta": {},
                "logprobs": None,
                "finish_reason": piece.finish,
                "matched_stop": piece.matched,
            }
            out += self._start + encode_json(finish) + self._close(count)
        return out

    def _delta(self, choice: int, delta: bytes, piece: Piece | None, count: CountTokens) -> bytes:
        """One chunk. Logprobs and ids of `piece` go with its first one."""
        logprobs = encode_json(self._entries(piece.logprobs)) if piece is not None and piece.logprobs else b"null"
        return b"".join(
            (
                self._start,
                b'{"index":%d,"delta":' % choice,
                delta,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":null',
                self._ids(piece) if piece is not None else b"",
                b"}",
                self._close(count),
            )
        )

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(piece),
            "logprobs": self._entries(piece.logprobs) if self._logprobs else None,
            "finish_reason": piece.finish,
            "matched_stop": piece.matched,
            **({"token_ids": piece.token_ids} if self._returns_ids else {}),
        }

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _merged(events: Sequence[Event]) -> list[Event]:
    """Neighbours of one kind as one event: what a step gives goes out in as few chunks as possible."""
    merged: list[Event] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case (Text(before), Text(after)):
                merged[-1] = Text(before + after)
            case (Thought(before), Thought(after)):
                merged[-1] = Thought(before + after)
            case (CallArguments(index, before), CallArguments(same, after)) if index == same:
                merged[-1] = CallArguments(index, before + after)
            case _:
                merged.append(event)
    return merged


def _delta_of(event: Event) -> bytes:
    match event:
        case Text(text):
            return b'{"content":' + encode_json(text) + b"}"
        case Thought(text):
            return b'{"reasoning_content":' + encode_json(text) + b"}"
        case CallStart(index, name, call_id):
            function = {"name": name, "arguments": ""}
            return encode_json(
                {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            )
        case CallArguments(index, text):
            return encode_json({"tool_calls": [{"index": index, "function": {"arguments": text}}]})


def _message(piece: Piece) -> dict[str, Any]:
    """The assistant's message. Content is null where calls stand in its place."""
    if not piece.events:
        return {"role": "assistant", "content": piece.text}
    parsed = Parsed().add(piece.events)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.text or (None if parsed.calls else "")}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.calls
        ]
    return message


class CompletionFormat(_Base):
    """`text_completion`, for both a stream and a whole answer. `echoes` is the text before each choice's own."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        usage: UsageOptions,
        num_top: int | None,
        echoes: Sequence[str],
        prompt_ids: Sequence[Sequence[int]] | None,
        n: int,
        prompt_logprobs: bool,
    ) -> None:
        """num_top: alternatives beside each token's logprob; None where no logprobs were asked for.
        prompt_ids: the prompt's tokens of each choice where the client asked for token ids, else None.
        n: choices a prompt. prompt_logprobs: whether each choice tells its prompt's, beside those of an echo."""
        super().__init__(head, tokenizer, usage)
        self._num_top = num_top
        self._echoes = echoes
        self._prompt_ids = prompt_ids
        self._returns_ids = prompt_ids is not None
        self._n = n
        self._tells_prompt = prompt_logprobs

    def opening(self, choice: int, count: CountTokens) -> bytes:
        """The echo of the prompt, if it was asked for."""
        echo = self._echoes[choice]
        ids = b"" if self._prompt_ids is None else b',"prompt_token_ids":' + encode_json(self._prompt_ids[choice])
        scored = self._echoed(choice)
        logprobs = encode_json(self._columns(choice, scored)) if scored else b"null"
        return self._event(choice, echo, logprobs + ids, count) if echo or ids else b""

    def _echoed(self, choice: int) -> list[TokenLogprob | PromptScore]:
        """The prompt's tokens, where both the echo and logprobs were asked for."""
        shown = self._echoes[choice] and self._num_top is not None
        return list(self._prompt_scores.get(choice // self._n, ())) if shown else []

    def events(self, choice: int, piece: Piece, count: CountTokens) -> bytes:
        """A text event when there is any, and the finish event at the end."""
        out = b""
        if self._has_delta(piece):
            logprobs = encode_json(self._columns(choice, piece.logprobs)) if piece.logprobs else b"null"
            out = self._event(choice, piece.text, logprobs + self._ids(piece), count)
        if piece.finish:
            finish = {
                "index": choice,
                "text": "",
                "logprobs": None,
                "finish_reason": piece.finish,
                "matched_stop": piece.matched,
            }
            out += self._start + encode_json(finish) + self._close(count)
        return out

    def _event(self, choice: int, text: str, logprobs: bytes, count: CountTokens) -> bytes:
        parts = (
            self._start,
            b'{"index":%d,"text":' % choice,
            encode_json(text),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":null}',
            self._close(count),
        )
        return b"".join(parts)

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        told = self._num_top is not None
        logprobs = self._columns(index, [*self._echoed(index), *piece.logprobs]) if told else None
        return {
            "index": index,
            "text": self._echoes[index] + piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
            "matched_stop": piece.matched,
            **self._choice_ids(index, piece),
            **({"prompt_logprobs": self._prompt_logprobs(index // self._n)} if self._tells_prompt else {}),
        }

    def _choice_ids(self, index: int, piece: Piece) -> dict[str, Any]:
        if self._prompt_ids is None:
            return {}
        return {"prompt_token_ids": self._prompt_ids[index], "token_ids": piece.token_ids}

    def _columns(self, choice: int, logprobs: Sequence[TokenLogprob | PromptScore]) -> dict[str, Any]:
        text_of = self._tokenizer.token_text
        echo = self._echoes[choice]
        tops: list[dict[str, float] | None] = []
        for entry in logprobs:
            if entry.logprob is None:
                tops.append(None)
                continue
            # The token itself is there too, as OpenAI's API has it, also when it is not among the best. Of tokens that
            # are the same text (parts of characters), it is the one that is told.
            own = {text_of(entry.token_id): entry.logprob}
            tops.append(own | {text_of(token): logprob for token, logprob in entry.top} | own)
        echo_ids = [entry.token_id for entry in logprobs if isinstance(entry, PromptScore)]
        echoed = _echo_offsets(echo, echo_ids, self._tokenizer)
        own_offsets = [len(echo) + entry.offset for entry in logprobs if isinstance(entry, TokenLogprob)]
        return {
            "tokens": [text_of(entry.token_id) for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": tops if self._num_top else None,
            "text_offset": echoed + own_offsets,
        }


def _echo_offsets(echo: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Whole characters of `echo` before each of its tokens. Tokens that the tokenizer added to it take no room."""
    detokenizer = Detokenizer(tokenizer.vocabulary, hidden=frozenset(), continues=False)
    offsets, at = [], 0
    for token_id in token_ids:
        offsets.append(at)
        added = token_id in tokenizer.facts.special_ids and not echo.startswith(tokenizer.token_text(token_id), at)
        if not added:
            at += len(detokenizer.feed((token_id,)))
    return offsets
