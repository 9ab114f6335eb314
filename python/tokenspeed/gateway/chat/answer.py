# SPDX-License-Identifier: MIT
"""Runs a job: one attempt on one worker, whole or as a stream, and the count of what it used.

Lives on the loop's thread, a call a request. Rows of the engine go through one `Choice` machine each; a choice whose
text ended at a stop string is aborted on the engine at once. Retries wrap around this (`route.retry`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tokenspeed.gateway.chat.choice import Choice, Piece, Tokens
from tokenspeed.gateway.chat.format import PromptScore, Usage
from tokenspeed.gateway.chat.job import Job
from tokenspeed.gateway.chat.reply import Reply
from tokenspeed.gateway.http.errors import from_engine
from tokenspeed.gateway.route.generation import Generation
from tokenspeed.gateway.text.vocabulary import Vocabulary
from tokenspeed.rpc.lane.wire import BatchTokenIDOutSlim

_ONLY_ECHO = Piece("", (), "length", None, (), ())
Write = Callable[[bytes], Awaitable[None]]


class Answer:
    """What one attempt has given so far."""

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        self.first_token_s: float | None = None
        """`time.monotonic()` of the first token."""
        self.token_ids: list[int] = []
        """Of the one choice of a conversation's turn."""
        self.stopped_here = False
        """A stop of ours has ended all that the engine was still generating."""
        self.num_tail_tokens = 0
        """Tokens that came behind such a stop."""
        self._job = job
        self._gathers = job.turn is not None
        self._choices = [Choice(vocabulary, job.rules) for _ in range(job.num_generations)]
        rules = job.reply
        self._replies = [Reply(rules) for _ in self._choices] if rules is not None else None
        self._cached = [0] * len(job.prompts)
        self._num_open = job.num_generations

    def count(self) -> Usage:
        """Tokens so far. The prompt of n choices counts once; every candidate's tokens count."""
        return Usage(
            prompt_tokens=sum(map(len, self._job.prompts)),
            completion_tokens=0 if self._job.echo_only else sum(choice.num_tokens for choice in self._choices),
            cached_by_prompt=self._cached,
            reasoning_tokens=self._reasoning_tokens,
        )

    @property
    def _reasoning_tokens(self) -> int | None:
        if self._replies is None:
            return None
        return sum(reply.num_reasoning_tokens for reply in self._replies)

    async def whole(self, generation: Generation) -> bytes:
        """The body of the answer. Raises `ApiError`."""
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        with generation:
            while self._num_open:
                for index, batch, row in await generation.rows():
                    piece = self._take(generation, index, batch, row)
                    if piece is not None:
                        pieces[index].append(piece)
        return self._job.format.whole([_joined(pieces[i]) for i in self._best()], self.count())

    async def stream(self, generation: Generation, write: Write) -> bytes:
        """Write the events of the answer but for the last, which are given back: what ends the stream can go with them.
        Raises `ApiError`; some events may have been written by then."""
        form = self._job.format
        data = b""
        opened = [False] * len(self._choices)
        with generation:
            while self._num_open:
                if data:
                    await write(data)
                out = []
                for index, batch, row in await generation.rows():
                    piece = self._take(generation, index, batch, row)
                    if piece is None:
                        continue
                    if not opened[index]:
                        opened[index] = True
                        out.append(form.opening(index, self.count))
                    out.append(form.events(index, piece, self.count))
                data = b"".join(out)
        return data + form.ending(self.count)

    def _take(self, generation: Generation, index: int, batch: BatchTokenIDOutSlim, row: int) -> Piece | None:
        choice = self._choices[index]
        if choice.finish:
            self.num_tail_tokens += len(batch.output_ids[row])
            return None
        finish = batch.finished_reasons[row]
        if finish == "abort":
            _raise_if_refused(batch, row, self._job.names)
        tokens = _tokens_of(batch, row, finish)
        if not tokens.ids and not finish:
            return None
        if self.first_token_s is None and tokens.ids:
            self.first_token_s = time.monotonic()
        if index % self._job.candidates == 0:
            # Later choices of a prompt find it in the cache because the first one put it there.
            self._cached[index // self._job.candidates] = batch.cached_tokens[row]
        if batch.input_token_logprobs_val and batch.input_token_logprobs_val[row]:
            self._job.format.score_prompt(index // self._job.candidates, _prompt_scores(batch, row))
        piece = choice.feed(tokens)
        if self._job.echo_only:
            piece = _ONLY_ECHO
        if self._gathers:
            self.token_ids += tokens.ids
        if piece.finish:
            self._num_open -= 1
            self.stopped_here = generation.stop(index)
        return piece if self._replies is None else self._replies[index].pass_on(piece)

    def _best(self) -> list[int]:
        """The candidates that are answered: the n of each prompt whose tokens were most probable on average."""
        job = self._job
        kept: list[int] = []
        for start in range(0, job.num_generations, job.candidates):
            group = list(range(start, start + job.candidates))
            if job.candidates > job.params.n:
                group = sorted(group, key=lambda i: -self._choices[i].mean_logprob)[: job.params.n]
            kept.extend(group)
        return kept


def _joined(pieces: Sequence[Piece]) -> Piece:
    """The pieces of a finished choice as one."""
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    logprobs = [entry for piece in pieces for entry in piece.logprobs]
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    events = [event for piece in pieces for event in piece.events]
    text = "".join([piece.text for piece in pieces])
    return Piece(text, logprobs, last.finish, last.matched, token_ids, events, last.weight_version)


def _tokens_of(batch: BatchTokenIDOutSlim, row: int, finish: str) -> Tokens:
    ids = batch.output_ids[row]
    matched = None
    if finish == "stop":
        matched = batch.matched_stops[row] if batch.matched_stops else None
        if matched is None and ids:
            matched = ids[-1]
    return Tokens(
        ids=ids,
        logprobs=batch.output_token_logprobs_val[row],
        top_ids=batch.output_top_logprobs_idx[row] if batch.output_top_logprobs_idx else (),
        top_logprobs=batch.output_top_logprobs_val[row] if batch.output_top_logprobs_val else (),
        finish=finish,
        matched=matched,
        weight_version=batch.weight_versions[row] if batch.weight_versions else None,
    )


def _prompt_scores(batch: BatchTokenIDOutSlim, row: int) -> list[PromptScore]:
    ids, values = batch.input_token_logprobs_idx[row], batch.input_token_logprobs_val[row]
    blank: list[Any] = [[]] * len(ids)
    top_ids = batch.input_top_logprobs_idx[row] if batch.input_top_logprobs_idx else blank
    top_values = batch.input_top_logprobs_val[row] if batch.input_top_logprobs_val else blank
    return [
        PromptScore(token, value, tuple(zip(tops, tops_values)))
        for token, value, tops, tops_values in zip(ids, values, top_ids, top_values)
    ]


def _raise_if_refused(batch: BatchTokenIDOutSlim, row: int, names: Mapping[str, str]) -> None:
    """An abort with a status is the engine's error; one without is an end like others (somebody aborted it)."""
    status = batch.finished_status_codes[row] if batch.finished_status_codes else None
    message = batch.finished_messages[row] if batch.finished_messages else None
    if status or message:
        raise from_engine(status, message, names)
