# SPDX-License-Identifier: MIT
"""One attempt to generate: all choices of a request, on one worker, from submission to the last row or to an abort.

Rows arrive on the loop's thread and pile up in a list; the request's task takes the whole list at once. There is
one wake-up a step and request, however many choices and tokens the step brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from tokenspeed.gateway.http.errors import ApiError, invalid, no_available_workers, worker_lost
from tokenspeed.gateway.route.worker import Worker
from tokenspeed.rpc.lane.base import LaneNotReady, NoSuchRank
from tokenspeed.rpc.lane.wire import BatchTokenIDOutSlim, PlainGenerateReqInput, TokenizedGenerateReqInput

Row = tuple[int, BatchTokenIDOutSlim, int]
"""(choice, batch, row of the batch)."""


class _Sink:
    """Where the lane puts the rows of one choice."""

    __slots__ = ("_choice", "_generation")

    def __init__(self, generation: Generation, choice: int) -> None:
        self._generation = generation
        self._choice = choice

    def push(self, batch: BatchTokenIDOutSlim, row: int) -> None:
        self._generation._push((self._choice, batch, row))

    def fail(self, reason: str) -> None:
        self._generation._fail(reason)


class Generation:
    """A context manager: whatever has not finished when it is left is aborted on the engine."""

    def __init__(
        self, worker: Worker, requests: Sequence[PlainGenerateReqInput | TokenizedGenerateReqInput], num_tokens: int
    ) -> None:
        """num_tokens: of the prompts, as far as the worker has to compute them."""
        self.worker = worker
        self._num_tokens = num_tokens
        self._is_pending = False
        self._requests = requests
        self._open: dict[int, str] = {}
        self._rows: list[Row] = []
        self._told = [0] * len(requests)
        """Tokens of each choice that have arrived."""
        self._lost: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Generation:
        try:
            for choice, request in enumerate(self._requests):
                self.worker.lane.submit(request, _Sink(self, choice))
                self._open[choice] = request.rid
            self._is_pending = True
            self.worker.begin_prefill(self._num_tokens)
        except LaneNotReady as error:
            self._abort_open()
            raise no_available_workers(str(error)) from None
        except NoSuchRank as error:
            self._abort_open()
            raise invalid("data_parallel_rank", "invalid_value", str(error)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort_open()

    @property
    def done(self) -> bool:
        """Whether every choice has had its last row."""
        return not self._open

    async def rows(self) -> list[Row]:
        """The rows that have arrived since the last call, at least one. Raises `ApiError` when the engine is lost;
        rows that came before that are given first."""
        while not self._rows:
            if self._lost is not None:
                raise self._lost
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        rows, self._rows = self._rows, []
        return rows

    def stop(self, choice: int) -> bool:
        """End one choice early (its text is complete); the engine is told. Whether that ended all there was to end."""
        rid = self._open.pop(choice, None)
        if rid is None:
            return False
        self.worker.lane.end([rid])
        return not self._open

    def _end_prefill(self) -> None:
        """The first token has come, or none will."""
        if self._is_pending:
            self._is_pending = False
            self.worker.end_prefill(self._num_tokens)

    def _abort_open(self) -> None:
        self._end_prefill()
        rids, self._open = list(self._open.values()), {}
        if rids:
            self.worker.lane.abort(rids)

    def _push(self, row: Row) -> None:
        choice, batch, index = row
        if choice not in self._open:
            return
        finish = batch.finished_reasons[index]
        if self._is_pending and (finish or batch.output_ids[index]):
            self._end_prefill()
        told = self._told[choice] = self._told[choice] + len(batch.output_ids[index])
        # An engine may keep the token that ended a choice to itself; anything else that is missing was lost on the way.
        if batch.completion_tokens[index] > told + (finish == "stop"):
            self._abort_open()
            self._lost = worker_lost("results of the request were lost between the engine and the gateway")
            self._wake()
            return
        if finish:
            del self._open[choice]
        self._rows.append(row)
        self._wake()

    def _fail(self, reason: str) -> None:
        self._end_prefill()
        if self._open:
            self._open.clear()
            self._lost = worker_lost(reason)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
