# SPDX-License-Identifier: MIT
"""What the loop remembers of each live request: its strings, parameters and times. The scheduler knows the rest.

Owned by the loop's thread. A record lives from admission to the request's one terminal event; the integer id names
it in the scheduler, the string at the border.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.prompt_scores import PromptScores
from tokenspeed.grammar import CompiledGrammar
from tokenspeed.observability.request_stats import RequestClock


class RequestRecord:
    """One live request; `clock` collects its times."""

    __slots__ = (
        "request_id",
        "rid",
        "params",
        "prompt_ids",
        "output_ids",
        "clock",
        "held_tokens",
        "held_logprobs",
        "grammar",
        "room",
        "priority",
        "cache_salt",
        "traceparent",
        "prompt_scores",
        "num_extra",
        "is_queued",
    )

    def __init__(self, request_id: int, rid: str, params: SamplingParams, prompt_ids: NDArray[np.int32]) -> None:
        self.request_id = request_id
        self.rid = rid
        self.params = params
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.clock = RequestClock(time.time())
        self.held_tokens: list[int] = []
        """Tokens that wait for `stream_interval` of them."""
        self.grammar: CompiledGrammar | None = None
        """What the constraint was compiled to; set before the request is queued."""
        self.room = 0
        """Tokens of output it may have."""
        self.priority = 0
        self.cache_salt = 0
        self.traceparent: str | None = None
        self.prompt_scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            start, top_n = params.prompt_logprob_start, params.prompt_logprobs
            self.prompt_scores = PromptScores(prompt_ids, start, top_n, params.token_ids_logprob)
        self.is_queued = False
        """Whether the scheduler knows it: not while its grammar is compiled."""
        self.num_extra = 0
        """Tokens beyond one that steps gave it."""
        self.held_logprobs: list[tuple[float, list[float], list[int]]] = []

    @property
    def num_outputs(self) -> int:
        """Steps that gave it tokens."""
        return len(self.output_ids) - self.num_extra


class RequestTable:
    """Live requests by either name, and what the set of them asks of a step."""

    def __init__(self) -> None:
        self._by_id: dict[int, RequestRecord] = {}
        self._by_rid: dict[str, RequestRecord] = {}
        self._logprobs: Counter[int] = Counter()
        self._num_scoring = 0
        self._num_intervals = 0
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def new_record(self, rid: str, params: SamplingParams, prompt_ids: NDArray[np.int32]) -> RequestRecord:
        """A record under the next id, not yet in the table."""
        self._next_id += 1
        return RequestRecord(self._next_id, rid, params, prompt_ids)

    def add(self, record: RequestRecord) -> None:
        self._by_id[record.request_id] = record
        self._by_rid[record.rid] = record
        if record.params.logprobs is not None:
            self._logprobs[record.params.logprobs] += 1
        self._num_intervals += record.params.stream_interval > 1
        self._num_scoring += record.prompt_scores is not None

    def remove(self, record: RequestRecord) -> None:
        self._num_scoring -= record.prompt_scores is not None
        del self._by_id[record.request_id]
        del self._by_rid[record.rid]
        self._num_intervals -= record.params.stream_interval > 1
        wanted = record.params.logprobs
        if wanted is not None:
            self._logprobs[wanted] -= 1
            if not self._logprobs[wanted]:
                del self._logprobs[wanted]

    def __getitem__(self, request_id: int) -> RequestRecord:
        return self._by_id[request_id]

    def with_ids(self, request_ids: list[int]) -> list[RequestRecord]:
        """The records of live requests, in order."""
        return list(map(self._by_id.__getitem__, request_ids))

    @property
    def any_special(self) -> bool:
        """Whether a live request wants logprobs, or its tokens several at a time."""
        return bool(self._logprobs or self._num_intervals)

    def get(self, request_id: int) -> RequestRecord | None:
        return self._by_id.get(request_id)

    @property
    def any_scoring(self) -> bool:
        """Whether a live request wants logprobs of its prompt."""
        return self._num_scoring > 0

    def oldest_waiting_ts(self) -> float | None:
        """When the oldest request that never ran arrived; records are in the order of arrival."""
        return next((record.clock.recv_ts for record in self._by_id.values() if record.clock.commit_ts is None), None)

    def of_rid(self, rid: str) -> RequestRecord | None:
        return self._by_rid.get(rid)

    def all(self) -> list[RequestRecord]:
        return list(self._by_id.values())

    @property
    def num_logprobs(self) -> int | None:
        """The most alternatives that a live request wants per token; None when nobody wants logprobs."""
        return max(self._logprobs) if self._logprobs else None
