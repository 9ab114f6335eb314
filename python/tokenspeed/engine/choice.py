# SPDX-License-Identifier: MIT
"""One choice of an in-process request while it grows: tokens to text, stop strings, logprobs, the reason it ended.

Fed by the caller's thread with the deltas of its request. The machines for text are the gateway's own, so offline
and served text agree to the character.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.config.sampling import RequestError, SamplingParams
from tokenspeed.engine.local_frontend import Delta
from tokenspeed.engine.messages import PromptLogprobs
from tokenspeed.gateway.text.detokenizer import Detokenizer
from tokenspeed.gateway.text.stop import StopMatcher
from tokenspeed.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """A sampled token, its natural-log probability, and the most probable alternatives, best first. chosen: of the
    request's `token_ids_logprob`, in its order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    chosen: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Choice:
    """token_ids: every new token, a final stop token included. text: without it, and without a matched stop string
    (unless `include_stop_str_in_output`). finish_reason: "stop", "length", "abort"; None while it goes on. error: why
    the engine ended it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None
    stop_match: str | int | None
    """The stop string or stop token that ended it."""
    error: str | None = None

    @property
    def mean_logprob(self) -> float:
        """Per token; 0 without logprobs."""
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


class ChoiceBuilder:
    """Without a tokenizer there is no text, and no stop strings."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.weight_version = ""
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.new_text = ""
        """Text that the last `feed` added."""
        self._params = params
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._stop_match: str | int | None = None
        self._error: str | None = None
        self._detokenizer = (
            Detokenizer(
                tokenizer.vocabulary,
                hidden=tokenizer.hidden(params.skip_special_tokens, frozenset()),
                continues=True,
            )
            if tokenizer is not None
            else None
        )
        self._matcher = StopMatcher(params.stop)

    def feed(self, delta: Delta) -> bool:
        """Take a delta. True when a stop string has just ended the choice, so that the engine may abort the rest.

        Raises RequestError when the delta is a rejection by the caller's fault.
        """
        self.new_text = ""
        if delta.rejection is not None:
            if delta.rejection.status != 500:
                raise RequestError(delta.rejection.field, delta.rejection.code, delta.rejection.message)
            self.finish_reason, self._error = "abort", f"{delta.rejection.code}: {delta.rejection.message}"
            return False
        if self.finish_reason is not None:
            return False  # what was in flight when the stop string matched
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self.weight_version = delta.weight_version
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = _of_prompt(delta.prompt_logprobs, self._params.prompt_logprobs or 0)
        self._token_ids += delta.token_ids
        self._take_logprobs(delta)
        stopped = self._take_text(delta)
        if stopped:
            self.finish_reason = "stop"
        elif delta.finish:
            self.finish_reason = delta.finish
            if delta.matched_token >= 0:
                self._stop_match = delta.matched_token
        return stopped and not delta.finish

    def result(self) -> Choice:
        """The choice so far; it stays as it is when the choice goes on."""
        return Choice(
            self.index,
            "".join(self._pieces),
            list(self._token_ids),
            self.finish_reason,
            None if self._logprobs is None else list(self._logprobs),
            self._stop_match,
            self._error,
        )

    def _take_text(self, delta: Delta) -> bool:
        """Whether a stop string is complete now."""
        if self._detokenizer is None:
            return False
        tokens = delta.token_ids[:-1] if delta.matched_token >= 0 else delta.token_ids
        text = self._detokenizer.feed(tokens)
        if delta.finish:
            text += self._detokenizer.close()
        shown, matched = self._matcher.feed(text)
        if matched is not None:
            self._stop_match = matched
            shown += matched if self._params.include_stop_str_in_output else ""
        elif delta.finish:
            shown += self._matcher.close()
        self.new_text = shown
        self._pieces.append(shown)
        return matched is not None

    def _take_logprobs(self, delta: Delta) -> None:
        if self._logprobs is None or delta.logprobs is None:
            return
        columns = zip(delta.token_ids, delta.logprobs.values, delta.logprobs.top_ids, delta.logprobs.top_values)
        for token_id, value, top_ids, top_values in columns:
            told = tuple(zip(top_ids, top_values))
            num_top = self._params.logprobs or 0
            self._logprobs.append(TokenLogprob(token_id, value, told[:num_top], told[num_top:]))


def _of_prompt(scores: PromptLogprobs, num_top: int) -> list[TokenLogprob | None]:
    columns = zip(scores.token_ids, scores.values, scores.top_ids, scores.top_values)
    return [
        None if value is None else TokenLogprob(token_id, value, told[:num_top], told[num_top:])
        for token_id, value, top_ids, top_values in columns
        for told in (tuple(zip(top_ids, top_values)),)
    ]
