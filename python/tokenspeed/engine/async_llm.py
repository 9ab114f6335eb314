# SPDX-License-Identifier: MIT
"""`AsyncLLM`: the same engine for asyncio. Each request is an async iterator; leaving it aborts the request.

It may be given an `Engine`, which then serves both. Text is assembled in the event loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.local_frontend import Delta
from tokenspeed.engine.offline import Engine, Job, Prompt, RequestOutput
from tokenspeed.engine.token_steps import token_steps


class AsyncLLM:
    """`AsyncLLM("model", **flags)` owns its engine; `AsyncLLM(engine=engine)` shares one and does not stop it."""

    def __init__(self, model: str | None = None, engine: Engine | None = None, **options: Any) -> None:
        self._owns_engine = engine is None
        self.engine = engine if engine is not None else Engine(model, **options)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output as it grows: so far, or with `stream_output` only what is new since the last one.

        The last item has a finish reason for every choice. data_parallel_rank: the replica that serves it.
        Raises RequestError before anything runs, EngineDeadError.
        """
        job = self.engine.job(prompt, sampling_params, data_parallel_rank)
        frontend = self.engine.frontend
        builders = {request.rid: builder for request, builder in zip(job.requests, job.builders)}
        async with aclosing(token_steps(frontend, job.requests)) as steps:
            async for deltas in steps:
                for delta in deltas:
                    if builders[delta.rid].feed(delta):
                        frontend.end([delta.rid])
                yield self._output(job, deltas)

    def shutdown(self) -> None:
        """Stop the engine if it is ours."""
        if self._owns_engine:
            self.engine.shutdown()

    def _output(self, job: Job, deltas: list[Delta]) -> RequestOutput:
        if not self.engine.config.offline.stream_output:
            return job.output()
        new_tokens = {delta.rid: delta.token_ids for delta in deltas}
        return job.new_output(new_tokens)
