# SPDX-License-Identifier: MIT
"""The engine's door: a request is checked, gets its seed and its id, and enters the scheduler, or is rejected.

Called by the loop's thread. Frontends in the same process check requests before they send them and the gateway does
too; this is where a foreign gateway's requests meet the same rules. A request with a constraint waits here, in nobody's
way, until its grammar is compiled. A rejection is an answer, never an exception.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.config.constraint import Constraint
from tokenspeed.config.resolve import AdmissionConfig
from tokenspeed.config.sampling import (
    SEED_MAX,
    RequestError,
    SamplingParams,
    check_priority,
    check_prompt_range,
    derive_seed,
    room_for_output,
)
from tokenspeed.engine.messages import Add, Rejection
from tokenspeed.engine.records import RequestRecord, RequestTable
from tokenspeed.engine.turns import Verdict
from tokenspeed.grammar import Compiled, CompiledGrammar, Meter
from tokenspeed.sampling import ProcessorError, load_processor
from tokenspeed_cc import RequestSpec, Scheduler

_ALONE = -(2**62)
"""Below this, salts that no request shares: a prompt whose own tokens are scored is computed from its beginning."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of a request's constraint, and the grammar if it is one."""

    verdict: Verdict
    grammar: CompiledGrammar | None


class Grammars(Protocol):
    """Who compiles constraints; `GrammarCompiler` does. A ticket is a request's id."""

    def submit(self, constraint: Constraint, ticket: Hashable) -> None: ...
    def take(self) -> list[Compiled]: ...
    def forget(self, ticket: Hashable) -> None: ...


class Admission:
    def __init__(
        self, config: AdmissionConfig, scheduler: Scheduler, requests: RequestTable, grammars: Grammars
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._requests = requests
        self._grammars = grammars
        self.meter = Meter()
        self._compiling: dict[int, RequestRecord] = {}
        self._seed = secrets.randbits(63) if config.seed is None else config.seed
        self._num_drawn = 0
        self._checked: SamplingParams | None = None
        """Of the last request whose parameters were right."""
        self._alone = _ALONE

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def keep_private(self, start: int) -> None:
        """Salts that no request shares begin elsewhere in this run: a store outlives it. start: below 2**60."""
        self._alone = _ALONE - start

    def admit(self, request: Add) -> Rejection | None:
        """Queue the request, or have its grammar compiled first; None when it is in."""
        try:
            self._admit(request)
        except RequestError as error:
            return Rejection(request.rid, 400, error.field, error.code, error.message)
        return None

    def take_compiled(self) -> list[Outcome]:
        """What has become of constraints since the last call."""
        return [_outcome(done) for done in self._grammars.take()] if self._compiling else []

    def queue_compiled(self, outcomes: list[Outcome]) -> list[tuple[RequestRecord, Rejection]]:
        """Queue the requests whose grammars are there; those that have none and must end, with the reason."""
        return [refused for outcome in outcomes if (refused := self._compiled(outcome)) is not None]

    def abort(self, record: RequestRecord) -> bool:
        """Forget a request that waits for its grammar; False when it is not one."""
        if self._compiling.pop(record.request_id, None) is None:
            return False
        self._grammars.forget(record.request_id)
        return True

    def _admit(self, request: Add) -> None:
        if request.rid in self._requests:
            raise RequestError("rid", "duplicate_request_id", f"request id {request.rid!r} is in use")
        # A batch's requests often share one object of parameters.
        if request.params is not self._checked:
            check_params(request.params, self._config)
            check_processor(request.params, self._config)
            self._checked = request.params
        check_priority(request.priority)
        room = check_room(request.token_ids, request.params, self._config)
        record = self._requests.new_record(request.rid, self._settled(request.params), request.token_ids)
        record.room, record.priority, record.cache_salt = room, request.priority, request.cache_salt
        record.traceparent = request.traceparent
        constraint = record.params.constraint
        if constraint is None:
            self._queue(record)
            self._requests.add(record)
            return
        self._requests.add(record)
        self._compiling[record.request_id] = record
        self._grammars.submit(constraint.prepared(), record.request_id)

    def _compiled(self, outcome: Outcome) -> tuple[RequestRecord, Rejection] | None:
        verdict = outcome.verdict
        record = self._compiling.pop(verdict.request_id)  # whoever stops waiting says `forget`
        constraint = record.params.constraint
        assert constraint is not None
        try:
            if outcome.grammar is None:
                code = "grammar_error" if verdict.status == 400 else "grammar_unavailable"
                raise RequestError(constraint.kind, code, f"{constraint.kind}: {verdict.error}")
            record.grammar = self.meter.of(record.request_id, outcome.grammar)
            self._queue(record)
        except RequestError as error:
            return record, Rejection(record.rid, verdict.status or 400, error.field, error.code, error.message)
        return None

    def _queue(self, record: RequestRecord) -> None:
        params = record.params
        # The sampler lets a constrained output end where its grammar does, and holds the end back before that.
        constrained = record.grammar is not None
        spec = RequestSpec(
            request_id=record.request_id,
            token_ids=record.prompt_ids,
            max_new_tokens=record.room,
            min_new_tokens=0 if constrained else params.min_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos and not constrained,
            priority=record.priority,
            cache_salt=record.cache_salt if params.prompt_logprobs is None else self._alone - record.request_id,
            adapter=0,
        )
        try:
            self._scheduler.submit(spec)
        except ValueError as error:
            # What passed the checks above and still cannot ever fit: the pool or the step's budget is too small.
            raise RequestError("prompt", "request_too_large", str(error)) from None
        record.is_queued = True

    def _settled(self, params: SamplingParams) -> SamplingParams:
        """With a seed, whoever chose it, and the engine's stream interval where the request is content with less."""
        if self._config.always_greedy:
            params = replace(params, temperature=0.0)
        seed, interval = params.seed, max(params.stream_interval, self._config.stream_interval)
        if seed is None:
            self._num_drawn += 1
            if params.greedy and interval == params.stream_interval:
                return params  # which draws nothing
            seed = derive_seed(self._seed, self._num_drawn) & SEED_MAX
        return replace(params, seed=seed, stream_interval=interval)


def _outcome(done: Compiled) -> Outcome:
    assert isinstance(done.ticket, int)
    return Outcome(Verdict(done.ticket, done.error, done.status), done.grammar)


def check_request(token_ids: NDArray[np.integer[Any]], params: SamplingParams, config: AdmissionConfig) -> int:
    """The room for output, or `RequestError`. Also called by frontends, in their callers' threads."""
    check_params(params, config)
    return check_room(token_ids, params, config)


def check_params(params: SamplingParams, config: AdmissionConfig) -> None:
    """What of `check_request` does not depend on the prompt. Raises `RequestError`."""
    if params.n != 1 or params.num_generated != 1:
        raise RequestError("n", "invalid_value", f"n is {params.n}; whoever fans choices out sends one request each")
    params.validate(config.vocab_size, config.max_model_len)
    if params.constraint is not None and config.grammar_backend == "none":
        kind = params.constraint.kind
        raise RequestError(kind, "unsupported", f"{kind}: this engine runs with --grammar-backend none")


def check_data_rank(data_rank: int | None, num_replicas: int) -> None:
    """Raise `RequestError` for a replica that there is not."""
    if data_rank is None:
        return
    field = "data_parallel_rank"
    if isinstance(data_rank, bool) or not isinstance(data_rank, int):
        raise RequestError(field, "invalid_type", f"{field} must be an integer, got {data_rank!r}")
    if not 0 <= data_rank < num_replicas:
        raise RequestError(field, "invalid_value", f"{field} must be in [0, {num_replicas - 1}], got {data_rank}")


def check_room(token_ids: NDArray[np.integer[Any]], params: SamplingParams, config: AdmissionConfig) -> int:
    """The room for output of a prompt whose parameters are checked. Raises `RequestError`."""
    check_token_ids(token_ids, config.vocab_size)
    return room_for_output(len(token_ids), params.max_new_tokens, config.max_model_len)


def check_processor(params: SamplingParams, config: AdmissionConfig) -> None:
    """Raise `RequestError` for code that this engine does not run or cannot load."""
    for name in ("logits_processor", "custom_logit_processor"):
        if getattr(params, name) is not None and not config.allow_custom_processors:
            raise RequestError(name, "unsupported", f"{name}: the engine runs without --enable-custom-logit-processor")
    if params.logits_processor is not None and config.num_ranks > 1:
        raise RequestError(
            "logits_processor",
            "unsupported",
            f"logits_processor: a function cannot be given to {config.num_ranks} ranks; use custom_logit_processor",
        )
    if params.custom_logit_processor is not None:
        try:
            load_processor(params.custom_logit_processor, params.custom_params)
        except ProcessorError as error:
            raise RequestError("custom_logit_processor", "invalid_value", f"custom_logit_processor: {error}") from None


def check_token_ids(token_ids: NDArray[Any], vocab_size: int) -> None:
    """`check_prompt` of an integer array, without a loop in Python."""
    extremes = (int(token_ids.min()), int(token_ids.max())) if len(token_ids) else (0, 0)
    check_prompt_range(len(token_ids), *extremes, vocab_size)
