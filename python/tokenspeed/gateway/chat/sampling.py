# SPDX-License-Identifier: MIT
"""What a request asks of the sampler: from its fields to checked `SamplingParams`, and to their form on the lane.

Clients ask for the same again and again, so what was checked is remembered by the fields that asked for it. Fields are
typed by then, so that equal ones ask for the same; of those that hold lists or objects nothing is kept.
"""

from __future__ import annotations

import re
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from tokenspeed.config.sampling import MAX_BAD_WORDS, RequestError, SamplingParams
from tokenspeed.gateway.chat.constraints import chosen_constraint
from tokenspeed.gateway.chat.fields import SamplingFields, caller_names
from tokenspeed.gateway.http.errors import from_request_error, invalid
from tokenspeed.gateway.text.bad_words import bad_sequences
from tokenspeed.gateway.text.tokenizer import Tokenizer
from tokenspeed.rpc.lane.wire import GREEDY_TEMPERATURE, TOP_K_OFF, MoreSamplingParamsWire, SamplingParamsWire

_MAX_KNOWN = 1024
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_NO_PART = frozenset({"model", "cache_salt", "priority", "return_token_ids", "user"})
"""Fields that say nothing to the sampler."""
_part = attrgetter(*(name for name in SamplingFields.__struct_fields__ if name not in _NO_PART))


class Sampling(msgspec.Struct, frozen=True):
    """Checked parameters, and their form on the lane but for what differs by choice (`on_lane`)."""

    params: SamplingParams
    wire: SamplingParamsWire

    def replace(self, **changes: Any) -> Sampling:
        """With other parameters, which nobody checks."""
        return _sampling(replace(self.params, **changes))

    def on_lane(self, seed: int, max_new_tokens: int) -> SamplingParamsWire:
        """What goes to the engine for one choice."""
        return msgspec.structs.replace(self.wire, seed=seed, max_new_tokens=max_new_tokens)


class CheckedSampling:
    """Sampling of requests to a model with `tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[object, Sampling] = {}

    def of(self, fields: SamplingFields, logprobs: int | None, max_model_len: int) -> Sampling:
        """What `fields` ask for. Raises `ApiError` 400 that names a field."""
        key = (_part(fields), logprobs, max_model_len)
        try:
            known = self._known.get(key)
        except TypeError:  # a list or an object among them
            return self._checked(fields, logprobs, max_model_len)
        if known is None:
            known = self._checked(fields, logprobs, max_model_len)
            if known.params.constraint is None and known.params.custom_logit_processor is None:  # those may be large
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = known
        return known

    def _checked(self, fields: SamplingFields, logprobs: int | None, max_model_len: int) -> Sampling:
        params = _params(fields, self._tokenizer, logprobs)
        try:
            params.validate(self._tokenizer.size, max_model_len)
        except RequestError as error:
            raise from_request_error(error, caller_names(fields)) from None
        return _sampling(params)


def _sampling(params: SamplingParams) -> Sampling:
    return Sampling(params, _wire(params))


def _params(fields: SamplingFields, tokenizer: Tokenizer, logprobs: int | None) -> SamplingParams:
    """What the request asks of the sampler, over the model's own defaults. Raises `ApiError` 400 for what cannot be
    said in these terms; the ranges are checked by `SamplingParams.validate`."""
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "invalid_value", "stream_options needs stream to be true")
    values: dict[str, Any] = dict(tokenizer.facts.sampling_defaults)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "n",
        "ignore_eos",
        "skip_special_tokens",
    ):
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    asked = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    chosen = chosen_constraint(fields)
    if chosen is not None:
        values[chosen.kind] = chosen.text
    return SamplingParams(
        **values,
        max_new_tokens=asked,
        min_new_tokens=fields.min_tokens or 0,
        stop=_as_tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=_logit_bias(fields.logit_bias),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        bad_token_ids=tuple(map(tuple, fields.bad_words_ids or ())) + _bad_words(fields.bad_words, tokenizer),
        custom_logit_processor=fields.custom_logit_processor,
        custom_params=_custom_params(fields.custom_params),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(fields, logprobs),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
    )


def _prompt_logprobs(fields: SamplingFields, logprobs: int | None) -> int | None:
    """The lane has one number of alternatives for prompt and output."""
    asked = fields.prompt_logprobs
    if asked is None:
        return None
    if fields.stream:
        message = "prompt_logprobs is not available in a stream"
        raise invalid("prompt_logprobs", "unsupported_parameter", message)
    if logprobs is not None and logprobs != asked:
        message = f"prompt_logprobs must be the number of alternatives of the output's logprobs, {logprobs}"
        raise invalid("prompt_logprobs", "invalid_value", message)
    return asked


def _bad_words(words: list[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    if words and (len(words) > MAX_BAD_WORDS // 2 or not all(words)):
        raise invalid("bad_words", "invalid_value", f"bad_words has 1 to {MAX_BAD_WORDS // 2} texts, none empty")
    return bad_sequences(tokenizer, words or ())


def _custom_params(given: dict[str, Any] | None) -> dict[str, Any] | None:
    try:
        msgspec.msgpack.encode(given)
    except OverflowError:
        raise invalid("custom_params", "invalid_value", "custom_params has an integer of more than 64 bits") from None
    return given


def _as_tuple(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if not all(_TOKEN_ID.fullmatch(token) for token in bias):
        raise invalid("logit_bias", "invalid_value", "logit_bias maps token ids to numbers")
    return {int(token): value for token, value in bias.items()}


def _wire(params: SamplingParams) -> SamplingParamsWire:
    """The positional form of `params` in the lane's normal form. Stop strings stay with the gateway."""
    greedy = params.temperature < GREEDY_TEMPERATURE
    plain = SamplingParamsWire(
        max_new_tokens=None,
        stop=None,
        stop_token_ids=list(params.stop_token_ids) or None,
        temperature=1.0 if greedy else float(params.temperature),
        top_p=float(params.top_p),
        top_k=1 if greedy else (params.top_k if params.top_k > 0 else TOP_K_OFF),
        min_p=float(params.min_p),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        repetition_penalty=float(params.repetition_penalty),
        min_new_tokens=params.min_new_tokens,
        json_schema=params.json_schema,
        regex=params.regex,
        ebnf=params.ebnf,
        structural_tag=params.structural_tag,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        no_stop_trim=params.include_stop_str_in_output,
        thinking_budget=None,
        custom_params=params.custom_params,
        stream_interval=None,
        logit_bias=dict((params.logit_bias or {}).items()) or None,
        seed=None,
        logprobs=None,
        n=1,
        stop_strs=[],
        stop_str_max_len=0,
        is_normalized=True,
    )
    if not (params.allowed_token_ids or params.bad_token_ids or params.reasoning_end):
        return plain
    return MoreSamplingParamsWire(
        **{name: getattr(plain, name) for name in plain.__struct_fields__},
        allowed_token_ids=list(params.allowed_token_ids) or None,
        bad_token_ids=[list(sequence) for sequence in params.bad_token_ids] or None,
        reasoning_end=params.reasoning_end,
    )
