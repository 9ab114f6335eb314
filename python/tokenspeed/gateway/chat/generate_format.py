# SPDX-License-Identifier: MIT
"""The bytes of answers of `POST /generate`, in the shape that SGLang's clients know.

One object a choice: its text, token ids and `meta_info`. A stream sends the object again and again with the text so
far, so that the last event is the whole answer. Logprobs are [logprob, token id, text or null].
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.gateway.chat.choice import Piece, TokenLogprob
from tokenspeed.gateway.chat.format import CountTokens, PromptScore, Usage, encode_json
from tokenspeed.gateway.http.errors import ApiError
from tokenspeed.gateway.text.tokenizer import Tokenizer

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class GenerateShape:
    """ids: the request's id of each choice. prompt_lens: tokens of each prompt. n: choices of each prompt. batched: the
    client sent a list, or asked for several choices, and gets one. logprobs: None, or whether texts stand beside
    them. num_top: alternatives of each; behind them, where `chosen`, come the tokens that the client named."""

    ids: Sequence[str]
    prompt_lens: Sequence[int]
    n: int
    batched: bool
    logprobs: bool | None
    num_top: int
    chosen: bool


@dataclass
class _Told:
    """What a choice has given so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    tops: list[list[list[Any]]] = field(default_factory=list)
    chosen: list[list[list[Any]]] = field(default_factory=list)


class GenerateFormat:
    """One answer with its choices."""

    def __init__(self, shape: GenerateShape, tokenizer: Tokenizer) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._started_s = time.monotonic()
        self._told = [_Told() for _ in shape.ids]
        self._prompt_scores: dict[int, Sequence[PromptScore]] = {}

    def opening(self, choice: int, count: CountTokens) -> bytes:
        """Nothing comes before the first text."""
        return b""

    def score_prompt(self, prompt: int, scores: Sequence[PromptScore]) -> None:
        """Kept for the objects of the prompt's choices."""
        self._prompt_scores[prompt] = scores

    def events(self, choice: int, piece: Piece, count: CountTokens) -> bytes:
        """The choice so far."""
        self._take(choice, piece)
        return b"data: " + encode_json(self._object(choice, piece, count())) + b"\n\n"

    def ending(self, count: CountTokens) -> bytes:
        """The end of a stream."""
        return _DONE

    def failure(self, error: ApiError) -> bytes:
        """The error as an event, and the end."""
        return b"data: " + error.body + b"\n\n" + _DONE

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The answer in one body."""
        for choice, piece in enumerate(pieces):
            self._take(choice, piece)
        objects = [self._object(choice, piece, usage) for choice, piece in enumerate(pieces)]
        return encode_json(objects if self._shape.batched else objects[0])

    def _take(self, choice: int, piece: Piece) -> None:
        told = self._told[choice]
        told.text += piece.text
        told.token_ids += piece.token_ids
        for entry in piece.logprobs:
            told.logprobs.append(self._entry(entry.token_id, entry.logprob))
            told.tops.append(self._tops(entry))
            if self._shape.chosen:
                told.chosen.append(self._chosen(entry))

    def _tops(self, entry: TokenLogprob | PromptScore) -> list[list[Any]]:
        return [self._entry(token_id, logprob) for token_id, logprob in entry.top[: self._shape.num_top]]

    def _chosen(self, entry: TokenLogprob | PromptScore) -> list[list[Any]]:
        return [self._entry(token_id, logprob) for token_id, logprob in entry.top[self._shape.num_top :]]

    def _entry(self, token_id: int, logprob: float | None) -> list[Any]:
        return [logprob, token_id, self._tokenizer.token_text(token_id) if self._shape.logprobs else None]

    def _object(self, choice: int, piece: Piece, usage: Usage) -> dict[str, Any]:
        told, shape = self._told[choice], self._shape
        info: dict[str, Any] = {
            "id": shape.ids[choice],
            "finish_reason": _finish_reason(piece, len(told.token_ids)),
            "prompt_tokens": shape.prompt_lens[choice // shape.n],
            "completion_tokens": len(told.token_ids),
            "cached_tokens": usage.cached_by_prompt[choice // shape.n],
            "e2e_latency": time.monotonic() - self._started_s,
        }
        if piece.weight_version is not None:
            info["weight_version"] = piece.weight_version
        if shape.logprobs is not None:
            info["output_token_logprobs"] = told.logprobs
            info["output_top_logprobs"] = told.tops if shape.num_top else None
            if shape.chosen:
                info["output_token_ids_logprobs"] = told.chosen
        scores = self._prompt_scores.get(choice // shape.n)
        if scores is not None:
            info["input_token_logprobs"] = [self._entry(score.token_id, score.logprob) for score in scores]
            info["input_top_logprobs"] = list(map(self._tops, scores)) if shape.num_top else None
            if shape.chosen:
                info["input_token_ids_logprobs"] = list(map(self._chosen, scores))
        result: dict[str, Any] = {"text": told.text, "output_ids": told.token_ids, "meta_info": info}
        return {"index": choice, **result} if shape.batched else result


def _finish_reason(piece: Piece, length: int) -> dict[str, Any] | None:
    if not piece.finish:
        return None
    if piece.finish == "length":
        return {"type": "length", "length": length}
    return {"type": piece.finish, "matched": piece.matched}
