# SPDX-License-Identifier: MIT
"""The engine as servicers of other projects drive it: requests are `GenerateReqInput`s, outputs are dicts.

`ServedLLM.generate_request` gives `{"index", "text", "output_ids", "meta_info"}`: for a stream the new tokens of one
choice at a time, else the whole (for several choices a list). A choice that ends has a finish reason in its meta_info.
All calls belong to the event loop's thread; what has to wait for the engine's loop waits in a worker thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from tokenspeed.config.sampling import RequestError, bias_by_token
from tokenspeed.engine.choice import ChoiceBuilder
from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.local_frontend import Delta
from tokenspeed.engine.model_view import ModelView
from tokenspeed.engine.offline import Engine, Job
from tokenspeed.engine.token_steps import token_steps

CANCELLED = 522
"""`err_type` of a request that was ended from outside."""

Scores = list[tuple[float | None, int, str | None]]


@dataclass
class GenerateReqInput:
    """A request. `rid` is set afterwards: a name, or one for each choice."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    precomputed_multimodal_inputs: Any = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    data_parallel_rank: int | None = None
    log_metrics: bool = True


@dataclass
class RequestState:
    """A choice that somebody waits for."""

    finished: bool = False


@dataclass(frozen=True)
class FlushResult:
    success: bool
    message: str


@dataclass(frozen=True)
class LoadRow:
    """The load of one rank. Pages are KV blocks that running requests hold, and all that there are."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_pages: int
    num_total_pages: int


@dataclass(frozen=True)
class LoadSnapshot:
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_pages: int
    num_active_pages: int
    max_total_pages: int


class LoadSnapshots:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def fresh_snapshots(self) -> list[LoadSnapshot]:
        return [
            LoadSnapshot(
                rank, load.num_running, load.num_waiting, load.active_blocks, load.active_blocks, load.total_blocks
            )
            for rank, load in enumerate(self._engine.loads())
            if load is not None
        ]


class ServedLLM:
    """server_args: what its creator started it with, kept for those who ask. The engine is the creator's to stop."""

    def __init__(self, engine: Engine, server_args: Any) -> None:
        limits = engine.config.scheduler
        self.engine = engine
        self.server_args = server_args
        self.context_len = limits.max_model_len
        self.max_req_input_len = limits.max_model_len - 1
        self.model_config = ModelView(None, shape=engine.model_config, context_length=limits.max_model_len)
        self.rid_to_state: dict[str, RequestState] = {}
        self.last_receive_tstamp = time.time()
        self.gracefully_exit = False
        self.load_snapshot_store = LoadSnapshots(engine)
        self._numbers = 0

    def auto_create_handle_loop(self) -> None:
        """The engine's loop runs already."""

    async def generate_request(self, request: GenerateReqInput) -> AsyncGenerator[Any, None]:
        """Raises RequestError (a ValueError) for what cannot be honoured, EngineDeadError. Leaving it aborts."""
        job = self._job(request)
        answers = {
            add.rid: _Answer(builder, self, request.top_logprobs_num)
            for add, builder in zip(job.requests, job.builders)
        }
        self.rid_to_state |= {rid: RequestState() for rid in answers}
        try:
            async with aclosing(token_steps(self.engine.frontend, job.requests)) as steps:
                async for deltas in steps:
                    self.last_receive_tstamp = time.time()
                    for delta in deltas:
                        output = answers[delta.rid].feed(delta, request.stream)
                        if output is None:
                            continue
                        if answers[delta.rid].ended:
                            self.rid_to_state.pop(delta.rid, None)
                        if request.stream or len(answers) == 1:
                            yield output
                    if all(answer.ended for answer in answers.values()):
                        break
            if len(answers) > 1 and not request.stream:
                yield [answer.last for answer in answers.values()]
        finally:
            for rid in answers:
                self.rid_to_state.pop(rid, None)

    def abort_request(self, rid: str) -> None:
        """An unknown id is one that has ended."""
        self.engine.frontend.abort([rid])

    async def submit_encode(self, request: Any) -> None:
        raise RequestError("mm_inputs", "unsupported", "mm_inputs: this engine has no encoder tower")

    async def flush_cache(self) -> FlushResult:
        try:
            await asyncio.to_thread(self.engine.operations.flush_cache)
        except OperationError as error:
            return FlushResult(False, str(error))
        return FlushResult(True, "the prefix cache is empty")

    async def get_load(self) -> list[LoadRow]:
        return [
            LoadRow(rank, load.num_running + load.num_waiting, load.num_waiting, load.active_blocks, load.total_blocks)
            for rank, load in enumerate(self.engine.loads())
            if load is not None
        ]

    async def is_scheduler_paused(self) -> bool:
        return self.engine.operations.is_paused

    async def start_profile(self, **options: Any) -> None:
        """Raises RuntimeError where it cannot."""
        fields = {name: value for name, value in options.items() if value is not None}
        await self._profile(lambda: self.engine.operations.start_profile(fields))

    async def stop_profile(self) -> None:
        """Raises RuntimeError where it cannot."""
        await self._profile(self.engine.operations.stop_profile)

    def rl_advertisement(self) -> dict[str, str]:
        """Where the control endpoints are, as labels of the worker."""
        port = self.engine.ports.control_port
        host = self.engine.config.operations.control_host
        return {} if port is None else {"rl.control_url": f"http://{host}:{port}"}

    async def _profile(self, call: Callable[[], str]) -> None:
        try:
            await asyncio.to_thread(call)
        except OperationError as error:
            raise RuntimeError(str(error)) from None

    def _job(self, request: GenerateReqInput) -> Job:
        _refuse_absent(request)
        if request.input_ids is None and request.text is None:
            raise RequestError("prompt", "missing_required_parameter", "a request has input_ids or text")
        job = self.engine.job(_prompt(request), _params(request), request.data_parallel_rank)
        names = request.rid
        if names is None:
            self._numbers += 1
            names = f"served-{self._numbers}"
        if isinstance(names, str):
            names = [names] if len(job.requests) == 1 else [f"{names}-n{index}" for index in range(len(job.requests))]
        if len(names) != len(job.requests):
            raise RequestError("rid", "invalid_value", f"{len(names)} ids for {len(job.requests)} choices")
        return replace(job, requests=[replace(add, rid=name) for add, name in zip(job.requests, names)])


class _Answer:
    """One choice: deltas in, dicts out. num_top: alternatives that were asked for."""

    def __init__(self, builder: ChoiceBuilder, llm: ServedLLM, num_top: int) -> None:
        self.ended = False
        self.last: dict[str, Any] | None = None
        self._builder = builder
        self._llm = llm
        self._scores: Scores = []
        self._num_top = num_top
        self._tops: list[Scores | None] = []
        self._chosen: list[Scores] = []
        self._prompt_scores: Scores | None = None
        self._prompt_chosen: list[Scores] = []

    def feed(self, delta: Delta, streams: bool) -> dict[str, Any] | None:
        """What to hand on, if anything. Raises RequestError for a rejection."""
        if self.ended:
            return None
        if self._builder.feed(delta):
            self._llm.engine.frontend.end([delta.rid])
        self._take_scores(delta)
        result = self._builder.result()
        self.ended = result.finish_reason is not None
        if not self.ended and not streams:
            return None
        meta = {
            "id": delta.rid,
            "prompt_tokens": delta.prompt_tokens,
            "completion_tokens": delta.completion_tokens,
            "cached_tokens": delta.cached_tokens,
            "weight_version": delta.weight_version,
            "finish_reason": _finish(result.finish_reason, result.stop_match, delta),
        }
        if delta.logprobs is not None or self._scores:
            meta |= {"output_token_logprobs": self._scores, "output_top_logprobs": self._tops}
        if any(self._chosen):
            meta["output_token_ids_logprobs"] = self._chosen
        if self._prompt_scores is not None:
            meta["input_token_logprobs"] = self._prompt_scores
        if any(self._prompt_chosen):
            meta["input_token_ids_logprobs"] = self._prompt_chosen
        token_ids = delta.token_ids if streams else result.token_ids
        text = self._builder.new_text if streams else result.text
        self.last = {"index": self._builder.index, "text": text, "output_ids": token_ids, "meta_info": meta}
        return self.last

    def _take_scores(self, delta: Delta) -> None:
        if delta.logprobs is not None:
            found = delta.logprobs
            self._scores += [(value, token, None) for value, token in zip(found.values, delta.token_ids)]
            for values, tokens in zip(found.top_values, found.top_ids):
                told = _scores_of(values, tokens)
                self._tops.append(told[: self._num_top] or None)
                self._chosen.append(told[self._num_top :])
        if delta.prompt_logprobs is not None:
            prompt = delta.prompt_logprobs
            self._prompt_scores = _scores_of(prompt.values, prompt.token_ids)
            tops = zip(prompt.top_values, prompt.top_ids)
            self._prompt_chosen = [_scores_of(values, tokens)[self._num_top :] for values, tokens in tops]


def _scores_of(values: Sequence[float | None], token_ids: Sequence[int]) -> Scores:
    return [(value, token, None) for value, token in zip(values, token_ids)]


def _finish(reason: str | None, matched: str | int | None, delta: Delta) -> dict[str, Any] | None:
    if reason is None:
        return None
    if reason == "stop":
        return {"type": "stop", "matched": matched}
    if reason == "length":
        return {"type": "length", "length": delta.completion_tokens}
    return {"type": "abort", "message": "the request was aborted", "err_type": CANCELLED, "status_code": None}


def _refuse_absent(request: GenerateReqInput) -> None:
    absent = {
        "mm_inputs": (request.precomputed_multimodal_inputs is not None, "an encoder tower"),
        "bootstrap_room": (request.bootstrap_room is not None, "prefill/decode disaggregation"),
    }
    for name, (present, what) in absent.items():
        if present:
            raise RequestError(name, "unsupported", f"{name}: this engine does not have {what}")


def _prompt(request: GenerateReqInput) -> Any:
    return request.text if request.input_ids is None else request.input_ids


def _params(request: GenerateReqInput) -> Mapping[str, Any]:
    """`sampling_params` under our names. Stop tokens stay in the outputs; who asks for their trimming trims."""
    values = dict(request.sampling_params)
    values.pop("no_stop_trim", None)
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = bias_by_token(values["logit_bias"])
    values["token_ids_logprob"] = request.token_ids_logprob
    if request.return_logprob:
        values["logprobs"] = request.top_logprobs_num
        if request.logprob_start_len >= 0:
            values["prompt_logprobs"] = request.top_logprobs_num
            values["prompt_logprob_start"] = request.logprob_start_len
    return values
