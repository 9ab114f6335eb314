# SPDX-License-Identifier: MIT
"""`POST /v1/completions`: from the body to a `Job`, or to an `ApiError` that names the field."""

from __future__ import annotations

import time
from typing import cast

import msgspec

from tokenspeed.config.sampling import MAX_CHOICES
from tokenspeed.gateway.chat.choice import TextRules
from tokenspeed.gateway.chat.fields import (
    SamplingFields,
    caller_names,
    handling,
    parse_body,
    usage_options,
)
from tokenspeed.gateway.chat.format import CompletionFormat, Head
from tokenspeed.gateway.chat.job import Job, check_room
from tokenspeed.gateway.chat.model import ServedModel
from tokenspeed.gateway.http.errors import invalid
from tokenspeed.gateway.text.fill import FillForm
from tokenspeed.gateway.text.vocabulary import TokenSpelling

MAX_PROMPTS = 1024
_ANCHOR = "\n"
"""A text that never grows together with what follows, in vocabularies that spell bytes."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint: an endless text after a bare prompt is seldom wanted."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields of a text completion that are honoured."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


async def completion_job(body: bytes, model: ServedModel, request_id: str) -> Job:
    """Check everything that can be checked without an engine. Raises `ApiError`."""
    request, _ = await parse_body(body, CompletionRequest)
    echo_only = bool(request.echo) and _asked_tokens(request) == 0
    if echo_only:
        # An engine that reads a prompt gives a token, which nobody sees.
        request = msgspec.structs.replace(request, max_tokens=1, max_completion_tokens=None, min_tokens=None, stop=None)
    model.check_name(request.model)
    fill = _fill_form(request, model)
    sampling = model.sampling.of(request, request.logprobs, model.max_model_len)
    params = sampling.params
    candidates = _candidates(request, params.n)
    given = _as_list(request.prompt, model.max_model_len)
    prompts = [await _prompt_ids(prompt, request, model) for prompt in given]
    if fill is not None and request.suffix is not None:
        prompts = await _with_gaps(prompts, request.suffix, fill, model)
        sampling = sampling.replace(stop_token_ids=tuple({*params.stop_token_ids, *fill.ends}))
    check_room(request, prompts, "prompt", model.tokenizer.size, model.max_model_len)
    texts = [await _echo(prompt, model) if request.echo else "" for prompt in given]
    echoes = [text for text in texts for _ in range(params.n)]
    ids = [prompt for prompt in prompts for _ in range(params.n)] if request.return_token_ids else None
    usage = usage_options(request)
    head = Head(f"cmpl-{request_id}", int(time.time()), model.name)
    if candidates > params.n and params.logprobs is None:
        sampling = sampling.replace(logprobs=0)  # what the candidates are compared by
    if request.echo and request.logprobs is not None:
        sampling = sampling.replace(prompt_logprobs=request.logprobs)
    params = sampling.params
    form = CompletionFormat(
        head,
        model.tokenizer,
        usage,
        request.logprobs,
        echoes,
        ids,
        params.n,
        request.prompt_logprobs is not None,
    )
    return Job(
        request_id=head.id,
        endpoint="completions",
        prompts=prompts,
        sampling=sampling,
        handling=handling(request.priority, request.cache_salt, request.data_parallel_rank),
        max_tokens=params.max_new_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        candidates=candidates,
        rules=TextRules(
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            hidden=_hidden(params.skip_special_tokens, fill, model),
            continues=True,
            min_tokens=params.min_new_tokens,
            logprobs=params.logprobs is not None,
        ),
        reply=None,
        format=form,
        stream=bool(request.stream),
        names=caller_names(request),
        echo_only=echo_only,
    )


def _asked_tokens(request: CompletionRequest) -> int | None:
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _fill_form(request: CompletionRequest, model: ServedModel) -> FillForm | None:
    """How the model fills a gap; None where there is none to fill."""
    if not request.suffix:
        return None
    if model.fill is None:
        message = "suffix is not supported by this model: its vocabulary has no tokens for a gap to fill"
        raise invalid("suffix", "unsupported_parameter", message)
    if request.echo and request.logprobs is not None:
        message = "suffix goes with echo or with logprobs, not with both: the echo is not what the model reads"
        raise invalid("suffix", "invalid_value", message)
    return model.fill


async def _with_gaps(prompts: list[list[int]], suffix: str, form: FillForm, model: ServedModel) -> list[list[int]]:
    """Prompts whose answer stands between what they were and `suffix`. The token that begins a text stays in front."""
    facts, out = model.tokenizer.facts, []
    behind = await _encode_inner(suffix, model)
    for prompt in prompts:
        begins = int(bool(prompt) and prompt[0] == facts.bos_id)
        ends = int(len(prompt) > begins and prompt[-1] in facts.eos_ids)
        out.append(prompt[:begins] + form.prompt(prompt[begins : len(prompt) - ends], behind))
    return out


async def _encode_inner(text: str, model: ServedModel) -> list[int]:
    """Token ids of a text that does not begin where it begins: some vocabularies put a space in front of one that
    does."""
    if model.tokenizer.vocabulary.spelling is TokenSpelling.SENTENCEPIECE:
        anchor = await model.encode(_ANCHOR, "suffix", add_special_tokens=False)
        ids = await model.encode(_ANCHOR + text, "suffix", add_special_tokens=False)
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
    return await model.encode(text, "suffix", add_special_tokens=False)


def _hidden(skip_special_tokens: bool, fill: FillForm | None, model: ServedModel) -> frozenset[int]:
    hidden = model.tokenizer.hidden(skip_special_tokens, frozenset())
    return hidden if fill is None or not skip_special_tokens else hidden | fill.ends


def _candidates(request: CompletionRequest, n: int) -> int:
    best_of = request.best_of
    if best_of is None:
        return n
    if not n <= best_of <= MAX_CHOICES:
        raise invalid("best_of", "invalid_value", f"best_of must be at least n ({n}) and at most {MAX_CHOICES}")
    if request.stream and best_of > n:
        raise invalid("best_of", "invalid_value", "best_of must equal n in a stream: the best is known at the end only")
    return best_of


async def _prompt_ids(given: str | list[int], request: CompletionRequest, model: ServedModel) -> list[int]:
    if isinstance(given, str):
        add_special = request.add_special_tokens is not False
        return await model.encode(given, "prompt", add_special_tokens=add_special)
    return given


async def _echo(given: str | list[int], model: ServedModel) -> str:
    return given if isinstance(given, str) else await model.text(given, skip_special_tokens=False)


def _as_list(prompt: str | list[str | int | list[int]], max_model_len: int) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "empty_array", "prompt must not be empty")
    if isinstance(prompt[0], int) and len(prompt) > max_model_len:
        return [cast(list[int], prompt)]  # which is refused whatever the millions are
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(kinds) > 1:
        raise invalid("prompt", "invalid_type", "prompt mixes texts, token ids and lists of token ids")
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", "invalid_value", f"prompt has {len(prompt)} prompts, at most {MAX_PROMPTS}")
    return cast(list[str | list[int]], prompt)
