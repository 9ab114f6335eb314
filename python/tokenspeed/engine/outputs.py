# SPDX-License-Identifier: MIT
"""From a settled step to the columns that frontends publish: one pass over the rows that produced something.

Owned by the loop's thread; runs while the next step computes. Terminal events remove their records here, so a
request ends exactly once.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.engine.executor import StepTokens
from tokenspeed.engine.messages import LoadNumbers, PromptLogprobs, Rejection, StepOutput, TokenLogprobs
from tokenspeed.engine.prompt_scores import PromptPiece
from tokenspeed.engine.records import RequestRecord, RequestTable
from tokenspeed.sampling import RowFailure

FINISH_NAMES = ("", "stop", "length", "abort")


class OutcomeView(Protocol):
    """The scheduler's `Outcome`; see tokenspeed_cc.pyi."""

    @property
    def request_ids(self) -> NDArray[np.int64]: ...
    @property
    def rows(self) -> NDArray[np.int32]: ...
    @property
    def num_tokens(self) -> NDArray[np.int32]: ...
    @property
    def finish(self) -> NDArray[np.uint8]: ...
    @property
    def prompt_tokens(self) -> NDArray[np.int32]: ...
    @property
    def completion_tokens(self) -> NDArray[np.int32]: ...
    @property
    def cached_tokens(self) -> NDArray[np.int32]: ...
    @property
    def matched_tokens(self) -> NDArray[np.int32]: ...


class EndedView(Protocol):
    """The scheduler's `Ended`."""

    @property
    def request_id(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class OutputColumns:
    """Gathers what one turn of the loop has to say; `take` hands it over and starts afresh."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self.finished: list[tuple[RequestRecord, str]] = []
        """Records that ended since the last `take`, with the reason; for statistics."""
        self._reset()

    def _reset(self) -> None:
        self._rids: list[str] = []
        self._token_ids: list[list[int]] = []
        self._finish: list[str] = []
        self._counts: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        self._logprobs: list[TokenLogprobs | None] = []
        self._any_logprobs = False
        self._prompt_logprobs: list[PromptLogprobs | None] = []
        self._any_prompt_logprobs = False
        self._rejections: list[Rejection] = []
        self.finished = []

    def __bool__(self) -> bool:
        return bool(self._rids or self._rejections)

    def add_rejection(self, rejection: Rejection) -> None:
        self._rejections.append(rejection)

    def add_abort(self, record: RequestRecord, ended: EndedView, reason: str) -> None:
        """The terminal event of an aborted request, with the tokens that still waited for its stream interval. reason:
        "stop" when its text was complete."""
        counts = (ended.prompt_tokens, ended.completion_tokens, ended.cached_tokens, -1)
        self._append(record, [], None, "abort", counts)
        self._end(record, reason)

    def add_failure(self, record: RequestRecord, why: RowFailure) -> None:
        """The terminal event of a request that cannot go on."""
        constraint = record.params.constraint
        field = why.field or (constraint.kind if constraint is not None and why.status == 400 else "")
        self._rejections.append(Rejection(record.rid, why.status, field, why.code, why.message))
        self._end(record, "abort")

    def add_unqueued_refusal(self, record: RequestRecord, rejection: Rejection) -> None:
        """The terminal event of a request that cannot be queued after all."""
        self._rejections.append(rejection)
        self._end(record, "abort")

    def add_unqueued_abort(self, record: RequestRecord) -> None:
        """The terminal event of a request that was aborted before it was queued."""
        self._append(record, [], None, "abort", (len(record.prompt_ids), 0, 0, -1))
        self._end(record, "abort")

    def add_prompt_pieces(self, pieces: list[PromptPiece]) -> None:
        """Scores of prompts; whoever has ended meanwhile wants none."""
        for piece in pieces:
            record = self._requests.get(piece.request_id)
            if record is not None and record.prompt_scores is not None:
                record.prompt_scores.take(piece)

    def add_step(self, outcome: OutcomeView, tokens: StepTokens) -> None:
        """The rows of a settled step. Rows that only add a token go in as columns, others one by one."""
        records = self._requests.with_ids(outcome.request_ids.tolist())
        emitted = _emitted(outcome, tokens)
        for record, new in zip(records, emitted):
            record.output_ids.extend(new)
        if tokens.token_ids.shape[1] > 1:
            for record, new in zip(records, emitted):
                record.num_extra += max(0, len(new) - 1)
        now = time.time()
        for index in np.flatnonzero(outcome.completion_tokens <= outcome.num_tokens).tolist():
            records[index].clock.emitted(now)
        counts = (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens, outcome.matched_tokens)
        columns = tuple(column.tolist() for column in counts)
        if not self._requests.any_special and not outcome.finish.any():
            self._extend(records, emitted, columns)
            return
        rows = zip(records, outcome.rows.tolist(), emitted, outcome.finish.tolist(), zip(*columns))
        for record, row, new, finish, numbers in rows:
            logprobs = _logprobs(record, tokens, row) if new else None
            if finish or record.params.stream_interval == 1 or self._interval_is_full(record, new, logprobs):
                self._append(record, new, logprobs, FINISH_NAMES[finish], numbers)
            if finish:
                self._end(record, FINISH_NAMES[finish])

    def take(self, load: LoadNumbers, weight_version: str) -> StepOutput:
        """Everything gathered so far."""
        prompt, completion, cached, matched = self._counts
        output = StepOutput(
            rids=self._rids,
            token_ids=self._token_ids,
            finish=self._finish,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            matched_tokens=matched,
            logprobs=self._logprobs if self._any_logprobs else None,
            prompt_logprobs=self._prompt_logprobs if self._any_prompt_logprobs else None,
            rejections=self._rejections,
            load=load,
            weight_version=weight_version,
        )
        self._reset()
        return output

    def _extend(self, records: list[RequestRecord], emitted: list[list[int]], columns: tuple[list[int], ...]) -> None:
        """Rows that go on, want no logprobs and hold nothing back."""
        self._rids += [record.rid for record in records]
        self._token_ids += emitted
        self._finish += [""] * len(records)
        self._logprobs += [None] * len(records)
        for column, values in zip(self._counts, columns):
            column += values

    def _append(
        self,
        record: RequestRecord,
        emitted: list[int],
        logprobs: TokenLogprobs | None,
        finish: str,
        counts: tuple[int, int, int, int],
    ) -> None:
        if record.held_tokens:
            emitted, logprobs = _release(record, emitted, logprobs)
        self._rids.append(record.rid)
        self._token_ids.append(emitted)
        self._logprobs.append(logprobs)
        self._any_logprobs = self._any_logprobs or logprobs is not None
        prompt = record.prompt_scores.tell() if record.prompt_scores is not None and emitted else None
        self._prompt_logprobs.append(prompt)
        self._any_prompt_logprobs = self._any_prompt_logprobs or prompt is not None
        self._finish.append(finish)
        for column, value in zip(self._counts, counts):
            column.append(value)

    def _interval_is_full(self, record: RequestRecord, emitted: list[int], logprobs: TokenLogprobs | None) -> bool:
        """Whether the stream's next piece is complete with `emitted`; if not, it is kept. A first token never waits."""
        if len(record.held_tokens) + len(emitted) >= record.params.stream_interval:
            return True
        if len(record.output_ids) == len(emitted):
            return True
        record.held_tokens += emitted
        if logprobs is not None:
            record.held_logprobs += zip(logprobs.values, logprobs.top_values, logprobs.top_ids)
        return False

    def _end(self, record: RequestRecord, reason: str) -> None:
        self._requests.remove(record)
        self.finished.append((record, reason))


def _emitted(outcome: OutcomeView, tokens: StepTokens) -> list[list[int]]:
    """The tokens of each entry of the outcome; none for an end that belongs to no row."""
    found: list[list[int]] = tokens.token_ids[outcome.rows].tolist()
    if tokens.token_ids.shape[1] == 1 and (outcome.num_tokens == 1).all():
        return found
    return [row[:count] for row, count in zip(found, outcome.num_tokens.tolist())]


def _logprobs(record: RequestRecord, tokens: StepTokens, row: int) -> TokenLogprobs | None:
    wanted = record.params.logprobs
    if wanted is None or tokens.token_logprobs is None:
        return None
    values = [float(tokens.token_logprobs[row])]
    top_values: list[float] = []
    top_ids: list[int] = []
    if wanted and tokens.top_values is not None and tokens.top_ids is not None:
        top_values, top_ids = tokens.top_values[row, :wanted].tolist(), tokens.top_ids[row, :wanted].tolist()
    chosen = record.params.token_ids_logprob
    if chosen and tokens.chosen is not None:
        top_values, top_ids = top_values + tokens.chosen[row, : len(chosen)].tolist(), top_ids + list(chosen)
    return TokenLogprobs(values, [top_values], [top_ids])


def _release(
    record: RequestRecord, emitted: list[int], logprobs: TokenLogprobs | None
) -> tuple[list[int], TokenLogprobs | None]:
    """What was held back and what came now, as one piece."""
    tokens, held = record.held_tokens + emitted, record.held_logprobs
    record.held_tokens, record.held_logprobs = [], []
    if not held:
        return tokens, logprobs
    columns: Any = [list(column) for column in zip(*held)]
    if logprobs is not None:
        columns = [columns[0] + logprobs.values, columns[1] + logprobs.top_values, columns[2] + logprobs.top_ids]
    return tokens, TokenLogprobs(*columns)
