# SPDX-License-Identifier: MIT
"""`POST /v1/completions`: from the body to a `Job`, or to an `ApiError` that names the field."""

from __future__ import annotations

import time

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

MAX_PROMPTS = 1024
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
    request, _ = parse_body(body, CompletionRequest)
    model.check_name(request.model)
    _refuse_combinations(request)
    sampling = model.sampling.of(request, request.logprobs, model.max_model_len)
    params = sampling.params
    candidates = _candidates(request, params.n)
    prompts, texts = await _prompts(request, model)
    check_room(request, prompts, "prompt", model.tokenizer.size, model.max_model_len)
    echoes = [text for text in texts for _ in range(params.n)] if request.echo else [""] * len(texts) * params.n
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
        handling=handling(request.priority, request.cache_salt),
        max_tokens=params.max_new_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        candidates=candidates,
        rules=TextRules(
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            hidden=model.tokenizer.hidden(params.skip_special_tokens, frozenset()),
            continues=True,
            min_tokens=params.min_new_tokens,
            logprobs=params.logprobs is not None,
        ),
        reply=None,
        format=form,
        stream=bool(request.stream),
        names=caller_names(request),
    )


def _refuse_combinations(request: CompletionRequest) -> None:
    if request.suffix:
        raise invalid("suffix", "unsupported_parameter", "suffix is not supported: text is only generated at the end")


def _candidates(request: CompletionRequest, n: int) -> int:
    best_of = request.best_of
    if best_of is None:
        return n
    if not n <= best_of <= MAX_CHOICES:
        raise invalid("best_of", "invalid_value", f"best_of must be at least n ({n}) and at most {MAX_CHOICES}")
    if request.stream and best_of > n:
        raise invalid("best_of", "invalid_value", "best_of must equal n in a stream: the best is known at the end only")
    return best_of


async def _prompts(request: CompletionRequest, model: ServedModel) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt, and their texts if they are to be echoed."""
    prompts: list[list[int]] = []
    texts: list[str] = []
    add_special = request.add_special_tokens is not False
    for prompt in _as_list(request.prompt):
        if isinstance(prompt, str):
            prompts.append(await model.encode(prompt, "prompt", add_special_tokens=add_special))
            texts.append(prompt)
        else:
            prompts.append(prompt)
            texts.append(model.tokenizer.decode(prompt, skip_special_tokens=False) if request.echo else "")
    return prompts, texts


def _as_list(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "empty_array", "prompt must not be empty")
    numbers = [item for item in prompt if isinstance(item, int)]
    if len(numbers) == len(prompt):
        return [numbers]
    if numbers or len({isinstance(item, str) for item in prompt}) > 1:
        raise invalid("prompt", "invalid_type", "prompt mixes texts, token ids and lists of token ids")
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", "invalid_value", f"prompt has {len(prompt)} prompts, at most {MAX_PROMPTS}")
    return [item for item in prompt if not isinstance(item, int)]
