# SPDX-License-Identifier: MIT
"""One choice of a `Generate` call: the engine's deltas to chunks and the one `GenerateComplete`.

A stop token that ends a choice is left out of its tokens, unless the request keeps it. Stop strings are matched here,
on the text that the tokens make: the stream then ends behind the token that completes the string; what of the string
is shown is the caller's to cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.choice import ChoiceBuilder
from tokenspeed.engine.local_frontend import Delta
from tokenspeed.engine.messages import PromptLogprobs, TokenLogprobs
from tokenspeed.gateway.text.tokenizer import Tokenizer
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

Message: TypeAlias = pb.GenerateStreamChunk | pb.GenerateComplete


class ChoiceAnswer:
    """streams: chunks as tokens come; else everything in the complete message."""

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, streams: bool, keeps_stop: bool
    ) -> None:
        self.finished = False
        self._index = index
        self._streams = streams
        self._keeps_stop = keeps_stop
        self._text = ChoiceBuilder(index, params, tokenizer) if params.stop else None
        self._has_begun = False
        self._token_ids: list[int] = []
        self._logprobs = None if params.logprobs is None else pb.OutputLogProbs()
        self._prompt_logprobs: pb.PromptLogProbs | None = None

    def feed(self, delta: Delta) -> tuple[list[Message], bool]:
        """(messages, whether a stop string has just ended the choice so that the engine may abort the rest)."""
        if self.finished:
            return [], False
        stopped = self._text is not None and self._text.feed(delta)
        matched = self._text.result().stop_match if self._text is not None else None
        trims = delta.matched_token >= 0 and not self._keeps_stop
        token_ids = delta.token_ids[:-1] if trims else delta.token_ids
        scores = delta.logprobs and output_logprobs(token_ids, delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(delta.prompt_logprobs)
        messages: list[Message] = []
        if self._streams:
            messages += self._chunk(delta, token_ids, scores)
        else:
            self._token_ids += token_ids
            if self._logprobs is not None and scores:
                self._logprobs.MergeFrom(scores)
        if delta.finish or isinstance(matched, str):
            self.finished = True
            messages.append(self._complete(delta, matched))
        return messages, stopped

    def _chunk(
        self, delta: Delta, token_ids: list[int], scores: pb.OutputLogProbs | None
    ) -> list[pb.GenerateStreamChunk]:
        """The first one opens the choice for its reader, even without a token."""
        if not token_ids and self._has_begun:
            return []
        self._has_begun = True
        chunk = pb.GenerateStreamChunk(
            token_ids=token_ids,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            cached_tokens=delta.cached_tokens,
            output_logprobs=scores,
            index=self._index,
            weight_version=delta.weight_version,
            prompt_logprobs=self._prompt_logprobs,
        )
        self._prompt_logprobs = None
        return [chunk]

    def _complete(self, delta: Delta, matched: str | int | None) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason="stop" if isinstance(matched, str) else delta.finish,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            cached_tokens=delta.cached_tokens,
            output_logprobs=self._logprobs if not self._streams else None,
            index=self._index,
            weight_version=delta.weight_version,
            prompt_logprobs=self._prompt_logprobs,
        )
        if isinstance(matched, str):
            complete.matched_stop_str = matched
        elif delta.matched_token >= 0:
            complete.matched_token_id = delta.matched_token
        return complete


def output_logprobs(token_ids: Sequence[int], scores: TokenLogprobs) -> pb.OutputLogProbs:
    """Of the tokens that are told; the scores may have one more, of a stop token."""
    count = len(token_ids)
    return pb.OutputLogProbs(
        token_logprobs=scores.values[:count],
        token_ids=token_ids,
        top_logprobs=_tops(scores.top_values[:count], scores.top_ids[:count]),
    )


def prompt_logprobs(scores: PromptLogprobs) -> pb.PromptLogProbs:
    """NaN stands for what position 0 does not have."""
    return pb.PromptLogProbs(
        start=scores.start,
        token_ids=scores.token_ids,
        token_logprobs=[math.nan if value is None else value for value in scores.values],
        top_logprobs=_tops(scores.top_values, scores.top_ids),
    )


def _tops(values: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]]) -> list[pb.TopLogProbs]:
    return [pb.TopLogProbs(values=best, token_ids=tokens) for best, tokens in zip(values, token_ids)]
