# SPDX-License-Identifier: MIT
"""The loop's frontend inside one process: `Engine` and `AsyncLLM` put commands in, every caller gets its own rows.

`submit`, `abort`, `deliver` may be called by any thread; `drain` and `publish` belong to the loop's thread. A caller is
a `Mailbox`: a function that takes this step's rows of its requests, called once a step in the loop's thread; it must
not block. When the loop dies, `fail` tells every caller.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol

from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.messages import Abort, Add, Command, End, PromptLogprobs, Rejection, StepOutput, TokenLogprobs


class Delta(NamedTuple):
    """One request's part of a step. finish: "" while it goes on."""

    rid: str
    token_ids: list[int]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    matched_token: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: PromptLogprobs | None
    rejection: Rejection | None
    weight_version: str


Mailbox = Callable[[list[Delta] | EngineDeadError], None]


class RequestFrontend(Protocol):
    """Where requests go, to one replica of the engine or to several; `LocalFrontend` says what each of these does."""

    @property
    def replicas(self) -> list[LocalFrontend]: ...
    def place(self, data_rank: int | None) -> int: ...
    def submit(self, requests: Sequence[Add], mailbox: Mailbox) -> None: ...
    def abort(self, rids: Sequence[str]) -> None: ...
    def end(self, rids: Sequence[str]) -> None: ...
    def abandon(self, rids: Sequence[str]) -> None: ...
    def abort_where(self, chosen: Callable[[str], bool]) -> int: ...


class LocalFrontend:
    """One replica's."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Sequence[Command]] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._dead: EngineDeadError | None = None
        self.last_publish_s = time.monotonic()
        """When the loop last told of a step; it does so now and then also where no request has anything to say."""
        self.num_submitted = 0
        """Requests so far."""
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def replicas(self) -> list[LocalFrontend]:
        """The frontends of the replicas that serve."""
        return [self] if self.is_open else []

    @property
    def is_open(self) -> bool:
        """Whether its loop runs, as far as is known."""
        return self._dead is None

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    def knows(self, rid: str) -> bool:
        """Whether a request of that id has not ended."""
        return rid in self._mailboxes

    def place(self, data_rank: int | None) -> int:
        """The replica that a request should go to now: the one that is asked for, else the one with the least to do.
        Raises EngineDeadError when there is none."""
        return 0 if data_rank is None else data_rank

    def submit(self, requests: Sequence[Add], mailbox: Mailbox) -> None:
        """Queue requests, which the loop sees all at once; their rows go to `mailbox` until each has ended once.

        Raises EngineDeadError, and RequestError for an id that is in use.
        """
        if os.getpid() != self._process:
            # Threads do not come along, so nobody would ever answer; the lock may be held by one of them.
            raise EngineDeadError("the engine runs in the process that this one was forked from; make one here")
        with self._lock:
            if self._dead is not None:
                raise self._dead
            for request in requests:
                if request.rid in self._mailboxes:
                    raise RequestError("rid", "duplicate_request_id", f"request id {request.rid!r} is in use")
            for request in requests:
                self._mailboxes[request.rid] = mailbox
            self.num_submitted += len(requests)
        self.deliver(list(requests))

    def abort(self, rids: Sequence[str]) -> None:
        """Ask for the end of requests; their terminal rows still arrive, if they had not ended."""
        if rids:
            self.deliver([Abort(list(rids))])

    def end(self, rids: Sequence[str]) -> None:
        """The same for requests whose text is complete."""
        if rids:
            self.deliver([End(list(rids))])

    def abort_where(self, chosen: Callable[[str], bool]) -> int:
        """Abort the requests whose ids are chosen; how many there were."""
        with self._lock:
            rids = [rid for rid in self._mailboxes if chosen(rid)]
        self.abort(rids)
        return len(rids)

    def abandon(self, rids: Sequence[str]) -> None:
        """Abort requests whose caller has gone: nothing more is delivered for them."""
        with self._lock:
            for rid in rids:
                self._mailboxes.pop(rid, None)
        self.abort(rids)

    def deliver(self, commands: Sequence[Command]) -> None:
        """Hand commands to the loop. None at all end its idle wait."""
        self._commands.put(commands)

    def fail(self, cause: BaseException | None) -> None:
        """The loop has ended: every waiting caller and every later one learns it."""
        error = EngineDeadError("the engine has stopped" if cause is None else f"the engine died: {cause}")
        error.__cause__ = cause
        with self._lock:
            self._dead = error
            mailboxes, self._mailboxes = list(self._mailboxes.values()), {}
        for mailbox in {id(entry): entry for entry in mailboxes}.values():
            mailbox(error)

    def drain(self, timeout_s: float) -> list[Command]:
        commands: list[Command] = []
        try:
            first = self._commands.get(block=timeout_s > 0, timeout=timeout_s or None)
            while True:
                commands += first
                first = self._commands.get_nowait()
        except queue.Empty:
            return commands

    def publish(self, output: StepOutput) -> None:
        self.last_publish_s = time.monotonic()
        parcels: dict[int, tuple[Mailbox, list[Delta]]] = {}
        with self._lock:
            for delta in _deltas(output):
                mailbox = self._mailboxes.get(delta.rid)
                if mailbox is None:
                    continue
                if delta.finish:
                    del self._mailboxes[delta.rid]
                parcel = parcels.get(id(mailbox))
                if parcel is None:
                    parcel = parcels[id(mailbox)] = (mailbox, [])
                parcel[1].append(delta)
        for mailbox, deltas in parcels.values():
            mailbox(deltas)


def _deltas(output: StepOutput) -> list[Delta]:
    logprobs: Sequence[TokenLogprobs | None] = output.logprobs or [None] * len(output.rids)
    prompt_logprobs: Sequence[PromptLogprobs | None] = output.prompt_logprobs or [None] * len(output.rids)
    columns = zip(
        output.rids,
        output.token_ids,
        output.finish,
        output.prompt_tokens,
        output.completion_tokens,
        output.cached_tokens,
        output.matched_tokens,
        logprobs,
        prompt_logprobs,
        repeat(None),
        repeat(output.weight_version),
    )
    deltas = list(map(Delta._make, columns))
    for rejection in output.rejections:
        told = Delta(rejection.rid, [], "abort", 0, 0, 0, -1, None, None, rejection, output.weight_version)
        deltas.append(told)
    return deltas
