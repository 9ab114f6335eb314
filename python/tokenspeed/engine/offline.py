# SPDX-License-Identifier: MIT
"""`Engine`: the engine in this process, for batches. The loop runs on its own thread; callers block in `generate`.

Several threads may call `generate` at once, and an `AsyncLLM` may share the engine: all of them feed one loop.
Prompts are checked before any is sent, so a bad one raises and costs nothing.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed.config import hardware
from tokenspeed.config.flags import json_object, values_from_kwargs
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.flags_yaml import keywords_with_yaml
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import resolve_model
from tokenspeed.config.resolve import resolve
from tokenspeed.config.sampling import RequestError, SamplingParams, derive_seed
from tokenspeed.engine.admission import check_data_rank, check_params, check_processor, check_room, check_token_ids
from tokenspeed.engine.choice import Choice, ChoiceBuilder, TokenLogprob
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.kv_feed import KvLog
from tokenspeed.engine.local_frontend import Delta, RequestFrontend
from tokenspeed.engine.messages import Add, LoadNumbers
from tokenspeed.engine.one_replica import OneReplica
from tokenspeed.engine.ports import EnginePorts
from tokenspeed.engine.replica_operations import AnyOperations
from tokenspeed.engine.replicas import Replicas
from tokenspeed.engine.trainer_calls import TrainerCalls
from tokenspeed.gateway.text.bad_words import bad_sequences
from tokenspeed.gateway.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or an object with one of them under "prompt" or "prompt_token_ids"."""


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. `text`, `token_ids`, ... are those of the first choice."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    cached_tokens: int
    """Prompt tokens that came from the prefix cache (of the first choice)."""
    prompt_logprobs: list[TokenLogprob | None] | None
    """Of the prompt's tokens from `prompt_logprob_start` on, where they were asked for; None for the first token."""
    weight_version: str
    """The name of the weights that served the last token (of the first choice)."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True)
class Job:
    """One prompt on its way: the requests of its choices and the builders that take their deltas."""

    prompt_token_ids: list[int]
    requests: list[Add]
    builders: list[ChoiceBuilder]
    params: SamplingParams
    """As asked: how many of the choices are given, and whether with logprobs."""

    @property
    def done(self) -> bool:
        return all(builder.finish_reason is not None for builder in self.builders)

    def output(self) -> RequestOutput:
        choices = [builder.result() for builder in self.builders]
        if len(choices) > self.params.n:
            choices = sorted(choices, key=lambda choice: -choice.mean_logprob)[: self.params.n]
            choices = [replace(choice, index=index) for index, choice in enumerate(choices)]
            if self.params.logprobs is None:
                choices = [replace(choice, logprobs=None) for choice in choices]
        return self._output(choices)

    def new_output(self, new_tokens: Mapping[str, list[int]]) -> RequestOutput:
        """Only what the last deltas added; `new_tokens` by request id."""
        choices = []
        for request, builder in zip(self.requests, self.builders):
            whole, added = builder.result(), new_tokens.get(request.rid, [])
            logprobs = None if whole.logprobs is None else whole.logprobs[len(whole.logprobs) - len(added) :]
            text = builder.new_text if request.rid in new_tokens else ""
            choices.append(replace(whole, text=text, token_ids=added, logprobs=logprobs))
        return self._output(choices)

    def _output(self, choices: list[Choice]) -> RequestOutput:
        first = self.builders[0]
        facts = (first.cached_tokens, first.prompt_logprobs, first.weight_version)
        return RequestOutput(self.prompt_token_ids, choices, *facts)


class Engine(TrainerCalls):
    """An engine in this process. Options are the command's flags with underscores: `Engine("m.gguf", num_threads=2)`.
    With `data_parallel_size` its replicas are processes of their own, which end with this one.

    Raises ModelError (config.model_error), FlagError, OutOfMemory: one line each that says what to change.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        values = values_from_kwargs(keywords_with_yaml({"model": model, **options}, ENGINE_FLAGS), ENGINE_FLAGS).values
        self.flags: Mapping[str, Any] = values
        """Every flag by its keyword, as given or by default."""
        self.source = source = resolve_model(
            values["model"], revision=values["revision"], download_dir=values["download_dir"]
        )
        self.model_config = load_model_config(source, json_object(values, "hf_overrides"))
        machine = hardware.detect()
        self.config = resolve(values, machine, self.model_config)
        self.tokenizer: Tokenizer | None = None
        if not self.config.offline.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(self.tokenizer_path)
        self._numbers = itertools.count()
        self._serving: OneReplica | Replicas
        if self.config.parallel.data_rank is None:
            self._serving = Replicas(values, self.config)
        else:
            self._serving = OneReplica(self.config, source, self.model_config, machine)
        self._frontend: RequestFrontend = self._serving.frontend
        # Without this an engine that is dropped, not shut down, would keep its threads, processes and weights.
        weakref.finalize(self, self._serving.ask_to_stop).atexit = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the loop and give its memory back; whoever waits gets EngineDeadError. May be called twice."""
        self._serving.stop()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams
        | Mapping[str, Any]
        | Sequence[SamplingParams | Mapping[str, Any]]
        | None = None,
        progress: bool = False,
        data_parallel_rank: int | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids); outputs in the order of prompts, also for a lone prompt.

        sampling_params: one for all prompts or one a prompt. progress: a line on stderr while it works.
        data_parallel_rank: the replica that serves all of them; None: each goes where there is least to do.
        Raises RequestError naming the field, before anything runs; EngineDeadError.
        """
        listed = as_prompts(prompts)
        asked = _spread(sampling_params, len(listed))
        # Many prompts mostly share one object of parameters: each is looked at once.
        settled = {id(params): self._settled(params) for params in {id(params): params for params in asked}.values()}
        check_data_rank(data_parallel_rank, self.num_replicas)
        jobs = [self._job(prompt, settled[id(params)], data_parallel_rank) for prompt, params in zip(listed, asked)]
        mailbox: queue.SimpleQueue[list[Delta] | EngineDeadError] = queue.SimpleQueue()
        self._frontend.submit([request for job in jobs for request in job.requests], mailbox.put)
        try:
            self._collect(jobs, mailbox, progress)
        except BaseException:
            self._frontend.abandon([request.rid for job in jobs for request in job.requests])
            raise
        return [job.output() for job in jobs]

    def job(
        self, prompt: Prompt, params: SamplingParams | Mapping[str, Any] | None, data_parallel_rank: int | None = None
    ) -> Job:
        """Check a prompt and make the requests of its choices. Raises RequestError. Sends nothing."""
        check_data_rank(data_parallel_rank, self.num_replicas)
        return self._job(prompt, self._settled(params), data_parallel_rank)

    def _settled(self, params: SamplingParams | Mapping[str, Any] | None) -> tuple[SamplingParams, SamplingParams]:
        """Parameters as asked, and those of one choice; both are checked. Raises RequestError."""
        if params is not None and not isinstance(params, (SamplingParams, Mapping)):
            raise _no_params(params)
        settled = (
            params
            if isinstance(params, SamplingParams)
            else SamplingParams.from_mapping({**self.config.offline.preferred_params, **(params or {})})
        )
        if settled.stop and self.tokenizer is None:
            raise RequestError(
                "stop", "unsupported", "stop: without a tokenizer (skip_tokenizer_init) there is no text"
            )
        settled.validate(self.config.admission.vocab_size, self.config.admission.max_model_len)
        if settled.bad_words:
            settled = self._without_words(settled)
        single = settled if settled.n == 1 and settled.best_of is None else replace(settled, n=1, best_of=None)
        check_params(single, self.config.admission)
        check_processor(single, self.config.admission)
        if settled.num_generated > settled.n and single.logprobs is None:
            single = replace(single, logprobs=0)  # what the candidates are compared by
        return settled, single

    def _job(self, prompt: Prompt, checked: tuple[SamplingParams, SamplingParams], data_rank: int | None) -> Job:
        """checked: as `_settled` gives them. Raises RequestError."""
        settled, single = checked
        token_ids = self.encode(prompt)
        check_room(token_ids, single, self.config.admission)
        number, count = next(self._numbers), settled.num_generated
        base = secrets.randbits(63) if settled.seed is None and count > 1 else settled.seed
        requests, builders = [], []
        for index in range(count):
            seed = base if base is None else derive_seed(base, index)
            choice = single
            if seed != single.seed or index:
                # The prompt is the same for all choices: one scores it.
                choice = replace(single, seed=seed, prompt_logprobs=None if index else single.prompt_logprobs)
            requests.append(Add(f"{number}-{index}", token_ids, choice, 0, 0, data_rank=data_rank))
            builders.append(ChoiceBuilder(index, choice, self.tokenizer))
        return Job(token_ids.tolist(), requests, builders, settled)

    def _without_words(self, params: SamplingParams) -> SamplingParams:
        if self.tokenizer is None:
            raise RequestError("bad_words", "unsupported", "bad_words: without a tokenizer there is no text")
        sequences = bad_sequences(self.tokenizer, params.bad_words)
        return replace(params, bad_words=(), bad_token_ids=params.bad_token_ids + sequences)

    def encode(self, prompt: Prompt) -> NDArray[np.int32]:
        """Token ids of a prompt, int32. Raises RequestError."""
        if isinstance(prompt, Mapping):
            prompt = _inside(prompt)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("prompt", "unsupported", "prompt: without a tokenizer, prompts are token ids")
            try:
                prompt = self.tokenizer.encode(prompt, add_special_tokens=True)
            except (UnicodeEncodeError, TypeError):
                message = "the prompt contains characters that are no Unicode text"
                raise RequestError("prompt", "invalid_value", message) from None
        try:
            token_ids = np.asarray(prompt, dtype=None if len(prompt) else np.int32)
        except (OverflowError, ValueError, TypeError):
            raise RequestError("prompt", "invalid_type", "prompt must be text or a list of token ids") from None
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise RequestError("prompt", "invalid_type", "prompt must be text or a list of token ids")
        check_token_ids(token_ids, self.config.admission.vocab_size)
        return token_ids.astype(np.int32)

    @property
    def tokenizer_path(self) -> Path:
        """The file or folder that the tokenizer is read from."""
        named = self.flags["tokenizer"]
        return resolve_model(named).path if named else self.source.path

    @property
    def operations(self) -> AnyOperations:
        """What operators and trainers do to it, on all replicas."""
        return self._serving.operations

    @property
    def kv_log(self) -> KvLog:
        """What changes in the prefix cache; silent before `record_kv_events`."""
        return self._serving.kv_log

    def record_kv_events(self) -> None:
        """Feed `kv_log` from now on."""
        self._serving.record_kv_events()

    @property
    def is_alive(self) -> bool:
        """Whether its loop runs, or that of any replica."""
        return self._serving.is_alive

    @property
    def num_replicas(self) -> int:
        """How many the engine was started with; one that has died counts."""
        return 1 if self.config.parallel.data_rank is not None else self.config.parallel.data_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool, of each replica."""
        return self._serving.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.config.memory.block_size

    @property
    def frontend(self) -> RequestFrontend:
        """The way into the loop, for `AsyncLLM`."""
        return self._frontend

    @property
    def late_compiles(self) -> int:
        """Kernels that were compiled or loaded after the engine was ready; a promise is that it stays 0."""
        return self._serving.late_compiles

    @property
    def ports(self) -> EnginePorts:
        """Where the engine listens for operators, if it does. Raises EngineDeadError once it has stopped."""
        return self._serving.ports

    def load(self) -> LoadNumbers:
        """Requests and KV blocks at this moment (read beside the running loop, so approximate under load).

        Raises EngineDeadError once it has stopped."""
        return LoadNumbers.sum_of(load for load in self.loads() if load is not None)

    def loads(self) -> list[LoadNumbers | None]:
        """The same by replica; None of one that is gone."""
        return self._serving.loads()

    @property
    def _core(self) -> EngineCore | None:
        """Of an engine with one replica."""
        return self._serving.core if isinstance(self._serving, OneReplica) else None

    def _collect(
        self, jobs: list[Job], mailbox: queue.SimpleQueue[list[Delta] | EngineDeadError], progress: bool
    ) -> None:
        builders = {request.rid: (job, builder) for job in jobs for request, builder in zip(job.requests, job.builders)}
        meter = _Meter(len(jobs)) if progress else None
        remaining = len(builders)
        while remaining:
            deltas = mailbox.get()
            if isinstance(deltas, EngineDeadError):
                raise deltas
            for delta in deltas:
                job, builder = builders[delta.rid]
                if builder.feed(delta):
                    self._frontend.end([delta.rid])
                remaining -= bool(delta.finish)
                if meter is not None:
                    meter.update(len(delta.token_ids), bool(delta.finish) and job.done)


class _Meter:
    """A progress line on stderr, rewritten at most ten times a second."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self._num_done = 0
        self._num_tokens = 0
        self._started_s = self._shown_s = time.monotonic()

    def update(self, num_tokens: int, done: bool) -> None:
        self._num_tokens += num_tokens
        self._num_done += done
        now_s = time.monotonic()
        last = self._num_done == self._num_prompts and done
        if now_s - self._shown_s > 0.1 or last:
            self._shown_s = now_s
            speed = self._num_tokens / max(1e-9, now_s - self._started_s)
            end = "\n" if last else ""
            print(f"\r{self._num_done}/{self._num_prompts} prompts, {speed:.1f} tokens/s", end=end, file=sys.stderr)


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts; a lone text or a lone list of ids is one prompt. Raises RequestError."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError("prompt", "invalid_type", f"prompts must be texts or lists of token ids, got {prompts!r}")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, (int, np.integer)) for item in listed):
        return [listed]
    return listed


def _spread(
    params: SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]] | None, count: int
) -> list[SamplingParams | Mapping[str, Any] | None]:
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [params] * count
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        raise _no_params(params)
    if len(params) != count:
        raise RequestError("sampling_params", "invalid_value", f"{len(params)} sampling_params for {count} prompts")
    return list(params)


def _no_params(given: object) -> RequestError:
    kind = type(given).__name__
    message = f"sampling_params must be SamplingParams, a mapping of them, or a list of such, got {kind}"
    return RequestError("sampling_params", "invalid_type", message)


def _inside(prompt: Mapping[str, Any]) -> Any:
    """The one thing that a prompt object holds. Raises RequestError."""
    if len(prompt) == 1:
        for key, kinds in (("prompt", str), ("prompt_token_ids", Sequence)):
            if isinstance(prompt.get(key), kinds):
                return prompt[key]
    message = 'a prompt object holds a text under "prompt", or token ids under "prompt_token_ids", and nothing else'
    raise RequestError("prompt", "invalid_type", message)
