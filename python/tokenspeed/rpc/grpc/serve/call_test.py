# SPDX-License-Identifier: MIT
"""The gateway's end of gRPC against the real service: registration, tokens, the stop token, an abort."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tokenspeed.rpc.grpc.call.client import GrpcLane
from tokenspeed.rpc.grpc.serve.conftest import Served
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.base import LaneOptions, LaneState

PROMPT = [1, 3725, 198, 504, 3575, 282, 4649, 314]


def _request(rid: str, stream: bool, **sampling: Any) -> wire.PlainGenerateReqInput:
    nothing = dict.fromkeys(wire.SamplingParamsWire.__struct_fields__)
    defaults = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "n": 1, "min_new_tokens": 0}
    more = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    flags = dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), False)
    params: Any = nothing | defaults | more | flags | sampling
    return wire.PlainGenerateReqInput(
        rid, None, None, PROMPT, wire.SamplingParamsWire(**params), False, -1, 0, None, stream
    )


class Sink:
    """Collects the rows of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def push(self, batch: wire.BatchTokenIDOutSlim, row: int) -> None:
        self.tokens += batch.output_ids[row]
        if batch.finished_reasons[row]:
            self.finish.set_result(batch.finished_reasons[row])

    def fail(self, reason: str) -> None:
        self.finish.set_exception(ConnectionError(reason))


class Blocks:
    """Collects the blocks of one rank."""

    def __init__(self) -> None:
        self.tokens: set[tuple[int, ...]] = set()

    def store(self, block_hash: int, parent: int | None, tokens: Sequence[int], medium: str | None) -> None:
        if parent is None:
            self.tokens.add(tuple(tokens))

    def remove(self, block_hash: int, medium: str | None) -> None: ...
    def clear(self) -> None: ...


class Cache:
    """One engine's blocks; `seen` is set when `first` begins a prompt."""

    def __init__(self, first: Sequence[int]) -> None:
        self.seen = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self._first, self._blocks = tuple(first), Blocks()

    def of_rank(self, rank: int) -> Blocks:
        return self._blocks

    def was_told(self) -> None:
        if self._first in self._blocks.tokens:
            self.seen.set()

    def was_refused(self) -> None:
        raise AssertionError("it publishes events")


def test_what_the_engine_caches_is_told_to_a_gateway(served: Served) -> None:
    prompt = [*range(900, 920)]
    served.engine.generate(prompt, {"temperature": 0.0, "max_new_tokens": 2})

    async def drive() -> bool:
        cache = Cache(prompt[:16])
        ready = asyncio.Event()
        lane = GrpcLane(
            f"grpc://127.0.0.1:{served.server.port}",
            LaneOptions(None, None, 10.0),
            lambda state, reason: ready.set() if state is LaneState.READY else None,
        )
        lane.open()
        await asyncio.wait_for(ready.wait(), 30)
        lane.follow_kv(cache)
        await asyncio.wait_for(cache.seen.wait(), 30)
        lane.close()
        return True

    assert asyncio.run(drive())


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_gets_the_tokens_that_the_engine_gives_its_own_caller(served: Served, stream: bool) -> None:
    async def drive() -> tuple[list[int], str, list[int], str]:
        ready = asyncio.Event()
        lane = GrpcLane(
            f"grpc://127.0.0.1:{served.server.port}",
            LaneOptions(None, None, 10.0),
            lambda state, reason: ready.set() if state is LaneState.READY else None,
        )
        lane.open()
        await asyncio.wait_for(ready.wait(), 30)
        assert lane.ready_response.max_model_len == 1024 and lane.ready_response.block_size == 16
        whole, stopped, left = Sink(), Sink(), Sink()
        lane.submit(_request(f"whole-{stream}", stream, max_new_tokens=8), whole)
        finish = await asyncio.wait_for(whole.finish, 30)
        end = whole.tokens[3]
        lane.submit(_request(f"stopped-{stream}", stream, max_new_tokens=8, stop_token_ids=[end]), stopped)
        stop = await asyncio.wait_for(stopped.finish, 30)
        lane.submit(_request(f"left-{stream}", True, max_new_tokens=900), left)
        lane.abort([f"left-{stream}"])
        assert lane.num_in_flight == 0
        lane.close()
        return whole.tokens, finish, stopped.tokens, stop

    tokens, finish, stopped, stop = asyncio.run(drive())
    greedy = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    own = served.engine.generate(PROMPT, greedy)[0]
    assert tokens == own.token_ids and finish == "length"
    assert stopped == tokens[: tokens.index(tokens[3]) + 1] and stop == "stop"
