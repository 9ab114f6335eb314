# SPDX-License-Identifier: MIT
"""`AsyncLLM` and `Engine` over one loop: streams, early exits, and the same tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.async_llm import AsyncLLM
from tokenspeed.engine.offline import Engine, RequestOutput

StartEngine = Callable[..., Engine]
PARAMS = {"temperature": 0.9, "seed": 3, "max_new_tokens": 10, "ignore_eos": True}
PROMPT = [5, 6, 7, 8]


async def collect(llm: AsyncLLM, params: dict[str, Any], prompt: Any = PROMPT) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


def test_a_stream_grows_to_what_generate_returns(start_engine: StartEngine) -> None:
    engine = start_engine()
    llm = AsyncLLM(engine=engine)
    outputs = asyncio.run(collect(llm, PARAMS))
    assert outputs[-1].token_ids == engine.generate([PROMPT], PARAMS)[0].token_ids
    assert outputs[-1].finish_reason == "length"
    lengths = [len(output.token_ids) for output in outputs]
    assert len(lengths) > 1 and lengths == sorted(set(lengths)), "what was handed out does not grow later"


def test_disjoint_pieces_join_to_the_whole(start_engine: StartEngine) -> None:
    engine = start_engine(stream_output=True)
    pieces = asyncio.run(collect(AsyncLLM(engine=engine), {**PARAMS, "logprobs": 0}))
    joined = [token for piece in pieces for token in piece.token_ids]
    assert joined == engine.generate([PROMPT], PARAMS)[0].token_ids
    assert sum(len(piece.logprobs or []) for piece in pieces) == 10


def test_many_streams_and_choices_run_at_once(start_engine: StartEngine) -> None:
    engine = start_engine()
    llm = AsyncLLM(engine=engine)

    async def run() -> list[RequestOutput]:
        streams = [collect(llm, {**PARAMS, "n": 2, "seed": index}, [3 + index] * 9) for index in range(6)]
        return [outputs[-1] for outputs in await asyncio.gather(*streams)]

    outputs = asyncio.run(run())
    for index, output in enumerate(outputs):
        whole = engine.generate([[3 + index] * 9], {**PARAMS, "n": 2, "seed": index})[0]
        assert [choice.token_ids for choice in output.choices] == [choice.token_ids for choice in whole.choices]


def test_leaving_a_stream_aborts_its_request(start_engine: StartEngine) -> None:
    engine = start_engine()
    llm = AsyncLLM(engine=engine)

    async def leave() -> None:
        stream = llm.generate(PROMPT, {"max_new_tokens": 1000, "ignore_eos": True})
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while engine.load().active_blocks:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_bad_request_raises_at_the_first_step_of_the_stream(start_engine: StartEngine) -> None:
    with pytest.raises(RequestError, match="top_p"):
        asyncio.run(collect(AsyncLLM(engine=start_engine()), {"top_p": 7}))
