# SPDX-License-Identifier: MIT
"""For tests of the lane: a request, an engine that answers with the prompt, and who collects what comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.base import LaneOptions, LaneState
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneLost
from tokenspeed.rpc.lane.gateway_end import GatewayLane

SAMPLING = wire.SamplingParamsWire(
    max_new_tokens=16,
    stop=None,
    stop_token_ids=[2],
    temperature=0.5,
    top_p=1.0,
    top_k=wire.TOP_K_OFF,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    min_new_tokens=0,
    json_schema=None,
    regex=None,
    ebnf=None,
    structural_tag=None,
    ignore_eos=False,
    skip_special_tokens=True,
    spaces_between_special_tokens=True,
    no_stop_trim=False,
    thinking_budget=None,
    custom_params=None,
    stream_interval=None,
    logit_bias=None,
    seed=7,
    logprobs=None,
    n=1,
    stop_strs=[],
    stop_str_max_len=0,
    is_normalized=True,
)
"""Every field that any peer sends; tests change what they are about."""

ADD = wire.PlainGenerateReqInput("r-1", None, None, [1, 300, 70000], SAMPLING, True, -1, 2, None, True)

READY = wire.ReadyResponse(
    max_model_len=100,
    num_gpu_blocks=10,
    block_size=16,
    dtype="float32",
    vllm_version="tokenspeed-test",
    world_size=1,
    data_parallel_size=1,
    positional_layouts=wire.default_layouts(),
)


class Sink:
    """Collects what a request got."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], str]] = []
        self.failures: list[str] = []

    def push(self, batch: wire.BatchTokenIDOutSlim, row: int) -> None:
        self.rows.append((batch.output_ids[row], batch.finished_reasons[row]))

    def fail(self, reason: str) -> None:
        self.failures.append(reason)


class Engine:
    """An engine end on its own thread that answers every request with its prompt, and control calls with ok."""

    def __init__(
        self, url: str, index: int = 0, count: int = 1, answer: bool = True, abort_reasons: list[str] | None = None
    ) -> None:
        said = msgspec.structs.replace(READY, abort_reasons=abort_reasons)
        self.lane = EngineLane(address.handshake_address(url), index, said, count)
        self.seen: list[wire.EngineMessage] = []
        self.lost = threading.Event()
        self._answer = answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.lane.connect(timeout_s=10)
        try:
            while not self._stop.is_set():
                for message in self.lane.poll(0.02):
                    self.seen.append(message)
                    self._reply(message)
        except LaneLost:
            self.lost.set()
        self.lane.close()

    def _reply(self, message: wire.EngineMessage) -> None:
        if isinstance(message, wire.ControlCall):
            self.lane.reply(message, True, message.method)
        elif isinstance(message, wire.AddRequest) and self._answer:
            request = message.request
            self.lane.send(
                wire.BatchTokenIDOutSlim(
                    [request.rid],
                    [request.input_ids],
                    ["stop"],
                    [len(request.input_ids)],
                    [3],
                    [0],
                    [[]],
                    [[]],
                    self.lane.engine_index,
                    num_running=1,
                )
            )

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(url: str, count: int | None = None, startup_timeout_s: float = 60) -> AsyncIterator[GatewayLane]:
    lane = GatewayLane(url, LaneOptions(count, None, startup_timeout_s), lambda state, reason: None)
    lane.open()
    try:
        yield lane
    finally:
        lane.close()


def ready(lane: GatewayLane) -> Callable[[], bool]:
    return lambda: lane.state is LaneState.READY


def renamed(rid: str) -> wire.PlainGenerateReqInput:
    return msgspec.structs.replace(ADD, rid=rid)
