# SPDX-License-Identifier: MIT
"""The engine's door: a request is checked, gets its seed and its id, and enters the scheduler, or is rejected.

Called by the loop's thread. Frontends in the same process check requests before they send them and the gateway does
too; this is where a foreign gateway's requests meet the same rules. A rejection is an answer, never an exception.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenspeed.config.resolve import AdmissionConfig
from tokenspeed.config.sampling import (
    SEED_MAX,
    RequestError,
    SamplingParams,
    check_prompt_range,
    derive_seed,
    room_for_output,
)
from tokenspeed.engine.messages import Add, Rejection
from tokenspeed.engine.records import RequestTable
from tokenspeed_cc import RequestSpec, Scheduler


class Admission:
    def __init__(self, config: AdmissionConfig, scheduler: Scheduler, requests: RequestTable) -> None:
        self._config = config
        self._scheduler = scheduler
        self._requests = requests
        self._seed = secrets.randbits(63) if config.seed is None else config.seed
        self._num_drawn = 0

    def admit(self, request: Add) -> Rejection | None:
        """Queue the request; None when it is in."""
        try:
            self._admit(request)
        except RequestError as error:
            return Rejection(request.rid, 400, error.field, error.code, error.message)
        return None

    def _admit(self, request: Add) -> None:
        if request.rid in self._requests:
            raise RequestError("rid", "duplicate_request_id", f"request id {request.rid!r} is in use")
        room = check_request(request.token_ids, request.params, self._config)
        record = self._requests.new_record(request.rid, self._settled(request.params), request.token_ids)
        spec = RequestSpec(
            request_id=record.request_id,
            token_ids=request.token_ids,
            max_new_tokens=room,
            min_new_tokens=record.params.min_new_tokens,
            stop_token_ids=list(record.params.stop_token_ids),
            ignore_eos=record.params.ignore_eos,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=0,
        )
        try:
            self._scheduler.submit(spec)
        except ValueError as error:
            # What passed the checks above and still cannot ever fit: the pool or the step's budget is too small.
            raise RequestError("prompt", "request_too_large", str(error)) from None
        self._requests.add(record)

    def _settled(self, params: SamplingParams) -> SamplingParams:
        """With a seed, whoever chose it, and the engine's stream interval where the request is content with less."""
        seed = params.seed
        if seed is None:
            self._num_drawn += 1
            seed = derive_seed(self._seed, self._num_drawn) & SEED_MAX
        return replace(params, seed=seed, stream_interval=max(params.stream_interval, self._config.stream_interval))


def check_request(token_ids: NDArray[np.int32], params: SamplingParams, config: AdmissionConfig) -> int:
    """The room for output, or `RequestError`. Also called by frontends, in their callers' threads."""
    if params.n != 1:
        raise RequestError("n", "invalid_value", f"n is {params.n}; whoever fans choices out sends one request each")
    params.validate(config.vocab_size, config.max_model_len)
    check_token_ids(token_ids, config.vocab_size)
    return room_for_output(len(token_ids), params.max_new_tokens, config.max_model_len)


def check_token_ids(token_ids: NDArray[Any], vocab_size: int) -> None:
    """`check_prompt` of an integer array, without a loop in Python."""
    extremes = (int(token_ids.min()), int(token_ids.max())) if len(token_ids) else (0, 0)
    check_prompt_range(len(token_ids), *extremes, vocab_size)
