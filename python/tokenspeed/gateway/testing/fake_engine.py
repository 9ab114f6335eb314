# SPDX-License-Identifier: MIT
"""A scripted engine: a real peer on the lane that answers as a test tells it to, on its own thread.

By default every request gets the tokens of `reply` (one a step) and ends with "stop" by the end token or with
"length". A test may give another `script`: a function from the request to the steps of its answer. The engine counts
what it saw; it can be told to pause, to die with or without a word, and to come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneLost, LaneTimeout
from tokenspeed.rpc.lane.wire import AddRequest, BatchTokenIDOutSlim, ControlCall, TokenizedGenerateReqInput

END_TOKEN = 2
"""Ends an answer unless the request ignores it."""
WEIGHT_VERSION = "step-7"


@dataclass(frozen=True)
class Step:
    """What one step gives a request. Logprobs are -0.5 a token, -1 one of the prompt, which come with its first."""

    tokens: Sequence[int]
    finish: str = ""
    cached: int = 0
    status: int | None = None
    message: str | None = None
    delay_s: float = 0.0


Script = Callable[[TokenizedGenerateReqInput], Iterator[Step]]


def replying(tokens: Sequence[int], per_step: int = 1) -> Script:
    """A script that gives `tokens` and then the end token, within the request's limit."""

    def script(request: TokenizedGenerateReqInput) -> Iterator[Step]:
        limit = request.sampling_params.max_new_tokens or 1 << 30
        wanted = [*tokens, END_TOKEN][:limit]
        for start in range(0, len(wanted), per_step):
            chunk = wanted[start : start + per_step]
            last = start + per_step >= len(wanted)
            ended = chunk[-1] == END_TOKEN and not request.sampling_params.ignore_eos
            yield Step(chunk, "" if not last else ("stop" if ended else "length"))

    return script


@dataclass
class _Active:
    request: TokenizedGenerateReqInput
    steps: Iterator[Step]
    num_tokens: int = 0


@dataclass
class Seen:
    """What the engine was asked."""

    requests: list[TokenizedGenerateReqInput] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    controls: list[ControlCall] = field(default_factory=list)


class FakeEngine:
    """Starts at once; `stop` says goodbye on the lane, `vanish` does not."""

    def __init__(self, url: str, script: Script, *, name: str = "fake-model", max_model_len: int = 8192) -> None:
        self.seen = Seen()
        self.paused = threading.Event()
        self.control_answer = (True, "ok")
        """(success, message) of every answer to a control call."""
        self.num_waiting = 0
        """Requests that it says to queue."""
        self._script = script
        self._ready = wire.ReadyResponse(
            max_model_len=max_model_len,
            num_gpu_blocks=1024,
            block_size=16,
            dtype="float32",
            vllm_version="tokenspeed-fake",
            world_size=1,
            data_parallel_size=1,
            instance_id=name,
            positional_layouts=wire.default_layouts(),
        )
        self._url = url
        self._active: dict[str, _Active] = {}
        self._stop = threading.Event()
        self._goodbye = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End with ENGINE_CORE_DEAD, as an engine that is told to stop."""
        self._stop.set()
        self._thread.join(10)

    def vanish(self) -> None:
        """End without a word, as a process that is killed."""
        self._goodbye = False
        self.stop()

    @property
    def num_active(self) -> int:
        """Requests that are neither finished nor aborted."""
        return len(self._active)

    def _run(self) -> None:
        while not self._stop.is_set():
            lane = EngineLane(address.handshake_address(self._url), 0, self._ready)
            try:
                self._dial(lane)
                while not self._stop.is_set():
                    self._turn(lane)
            except LaneLost:
                self._active.clear()
            if not self._goodbye:
                lane._output = None
            lane.close()

    def _dial(self, lane: EngineLane) -> None:
        while not self._stop.is_set():
            try:
                lane.connect(timeout_s=0.5)
                return
            except LaneTimeout:
                continue

    def _turn(self, lane: EngineLane) -> None:
        for message in lane.poll(0 if self._active else 0.02):
            if isinstance(message, AddRequest):
                self.seen.requests.append(message.request)
                self._active[message.request.rid] = _Active(message.request, self._script(message.request))
            elif isinstance(message, ControlCall):
                self.seen.controls.append(message)
                lane.reply(message, *self.control_answer)
            elif isinstance(message, (wire.AbortRequests, wire.EndRequests)):
                self.seen.aborted.extend(message.request_ids)
                for rid in message.request_ids:
                    self._active.pop(rid, None)
        if self.paused.is_set():
            time.sleep(0.01)
        elif self._active:
            lane.send(self._step())

    def _step(self) -> BatchTokenIDOutSlim:
        rows: list[tuple[_Active, Step]] = []
        for rid, active in list(self._active.items()):
            step = next(active.steps)
            if step.delay_s:
                time.sleep(step.delay_s)
            active.num_tokens += len(step.tokens)
            rows.append((active, step))
            if step.finish:
                del self._active[rid]
        return _batch(rows, len(self._active), self.num_waiting)


def _batch(rows: Sequence[tuple[_Active, Step]], num_running: int, num_waiting: int) -> BatchTokenIDOutSlim:
    def tops(active: _Active, step: Step) -> list[list[int]]:
        width = active.request.top_logprobs_num
        named = active.request.token_ids_logprob or []
        return [[*(token + i for i in range(width)), *named] for token in step.tokens]

    def wants(active: _Active) -> bool:
        return active.request.return_logprob

    def scored(active: _Active, step: Step) -> list[int]:
        """Tokens of the prompt that are told with this step."""
        start = active.request.logprob_start_len
        return active.request.input_ids[start:] if start >= 0 and active.num_tokens == len(step.tokens) else []

    return BatchTokenIDOutSlim(
        rids=[active.request.rid for active, _ in rows],
        output_ids=[list(step.tokens) for _, step in rows],
        finished_reasons=[step.finish for _, step in rows],  # type: ignore[misc]
        prompt_tokens=[len(active.request.input_ids) for active, _ in rows],
        completion_tokens=[active.num_tokens for active, _ in rows],
        cached_tokens=[step.cached for _, step in rows],
        output_token_logprobs_val=[[-0.5] * len(step.tokens) if wants(active) else [] for active, step in rows],
        output_token_logprobs_idx=[list(step.tokens) if wants(active) else [] for active, step in rows],
        input_token_logprobs_val=[[None, *[-1.0] * len(scored(*row))][: len(scored(*row))] for row in rows],
        input_token_logprobs_idx=[scored(*row) for row in rows],
        num_running=num_running,
        num_waiting=num_waiting,
        kv_active_pages=num_running,
        kv_total_pages=1024,
        finished_status_codes=[step.status for _, step in rows],
        finished_messages=[step.message for _, step in rows],
        output_top_logprobs_val=[
            [[-0.5 - i for i in range(len(top))] for top in tops(active, step)] for active, step in rows
        ],
        output_top_logprobs_idx=[tops(active, step) for active, step in rows],
        matched_stops=[step.tokens[-1] if step.finish == "stop" and step.tokens else None for _, step in rows],
        weight_versions=[WEIGHT_VERSION for _ in rows],
    )
