# SPDX-License-Identifier: MIT
"""A checked request, ready to run: prompts, sampling, text rules, format. Both APIs make one; `answer` runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from tokenspeed.config.sampling import (
    SEED_MAX,
    RequestError,
    SamplingParams,
    check_prompt,
    check_prompt_range,
    derive_seed,
    room_for_output,
)
from tokenspeed.gateway.chat.choice import TextRules
from tokenspeed.gateway.chat.fields import Handling, SamplingFields, caller_names
from tokenspeed.gateway.chat.format import Format
from tokenspeed.gateway.chat.reply import ReplyRules
from tokenspeed.gateway.chat.sampling import Sampling
from tokenspeed.gateway.chat.turns import Continuation
from tokenspeed.gateway.http.errors import from_request_error
from tokenspeed.rpc.lane.wire import PlainGenerateReqInput, SamplingParamsWire, TokenizedGenerateReqInput

Request = PlainGenerateReqInput | TokenizedGenerateReqInput


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that running a request needs. Choice `i` of the answer is choice `i % n` of prompt `i // n`."""

    request_id: str
    endpoint: str
    """For metrics: "chat" or "completions"."""
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    handling: Handling
    max_tokens: int | None
    """What was asked for; None: `default_max_tokens`, or less where there is less room."""
    default_max_tokens: int | None
    """None: as many as there is room for."""
    candidates: int
    """Generated for each prompt; `params.n` of them are answered."""
    rules: TextRules
    reply: ReplyRules | None
    """The parsers of reasoning and tool calls; None: all text is content."""
    format: Format
    stream: bool
    names: Mapping[str, str]
    """Our names of parameters -> the caller's, for what the engine says of them."""
    turn: Continuation | None = None
    """Of a conversation; None for other prompts."""
    echo_only: bool = False
    """The answer is the prompt and what it is worth; what is generated behind it is not told."""

    @property
    def params(self) -> SamplingParams:
        """Of the sampler, checked."""
        return self.sampling.params

    @property
    def num_generations(self) -> int:
        """Requests that go to the engine."""
        return len(self.prompts) * self.candidates

    def requests(self, attempt: int, max_model_len: int, traceparent: str | None) -> list[Request]:
        """What goes to the engine, prompt by prompt; an open length ends where the engine's context does.
        traceparent: the span that the engine's hang under."""
        suffix = f"-r{attempt}" if attempt > 1 else ""
        out = []
        for p, prompt in enumerate(self.prompts):
            seed = self._seeds[p]
            for choice in range(self.candidates):
                number = p * self.candidates + choice
                rid = f"{self.request_id}{suffix}" + (f"-{number}" if self.num_generations > 1 else "")
                sampling = self.sampling.on_lane(derive_seed(seed, choice), self._length(prompt, max_model_len))
                out.append(self._request(rid, prompt, sampling, traceparent))
        return out

    def _length(self, prompt: Sequence[int], max_model_len: int) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        room = max(1, max_model_len - len(prompt))
        return room if self.default_max_tokens is None else min(room, self.default_max_tokens)

    @property
    def _seeds(self) -> list[int]:
        if self.params.seed is not None:
            return [self.params.seed] * len(self.prompts)
        # Drawn from the request's id: a retry repeats the attempt before it.
        return [_drawn_seed(self.request_id, number) for number in range(len(self.prompts))]

    def _request(
        self, rid: str, prompt: Sequence[int], sampling: SamplingParamsWire, traceparent: str | None
    ) -> Request:
        params = self.params
        wants = self.rules.logprobs or params.prompt_logprobs is not None
        plain = PlainGenerateReqInput(
            rid=rid,
            http_worker_ipc=None,
            input_text=None,
            input_ids=list(prompt),
            sampling_params=sampling,
            return_logprob=wants,
            logprob_start_len=-1 if params.prompt_logprobs is None else params.prompt_logprob_start,
            top_logprobs_num=max(params.logprobs or 0, params.prompt_logprobs or 0),
            token_ids_logprob=list(params.token_ids_logprob) or None,
            stream=self.stream,
        )
        more = dict(self.handling.columns)
        if traceparent is not None:
            more["traceparent"] = traceparent
        if params.custom_logit_processor is not None:
            more["custom_logit_processor"] = params.custom_logit_processor
        if not more:
            return plain
        return TokenizedGenerateReqInput(**{name: getattr(plain, name) for name in plain.__struct_fields__}, **more)


def _drawn_seed(request_id: str, number: int) -> int:
    digest = hashlib.blake2b(f"{request_id}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & SEED_MAX


def check_room(
    fields: SamplingFields, prompts: Sequence[Sequence[int]], param: str, vocab_size: int | None, max_model_len: int
) -> None:
    """Raise `ApiError` 400 (prompt, limit and what was asked, in words) for a prompt that is empty or too long, or has
    a token outside the vocabulary. vocab_size: None where the tokenizer made the tokens."""
    asked = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    try:
        for prompt in prompts:
            if vocab_size is None:
                check_prompt_range(len(prompt), 0, 0, 1)
            elif len(prompt) <= max_model_len:  # a longer one is refused whatever is in it
                check_prompt(prompt, vocab_size)
            room_for_output(len(prompt), asked, max_model_len)
    except RequestError as error:
        raise from_request_error(error, {**caller_names(fields), "prompt": param}) from None
