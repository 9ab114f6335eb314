# SPDX-License-Identifier: MIT
"""Some requests' deltas as an async iterator: what `AsyncLLM` and the gRPC servicer stand on.

Deltas cross from the loop's thread to the event loop's with one callback a step and group of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.local_frontend import Delta, RequestFrontend
from tokenspeed.engine.messages import Add


async def token_steps(frontend: RequestFrontend, requests: Sequence[Add]) -> AsyncGenerator[list[Delta], None]:
    """Submit requests and yield their deltas, a list a step, until each has ended once.

    Leaving it aborts what has not ended. Raises EngineDeadError, and RequestError for an id that is in use.
    """
    events: asyncio.Queue[list[Delta] | EngineDeadError] = asyncio.Queue()
    event_loop = asyncio.get_running_loop()
    live = {request.rid for request in requests}

    def deliver(item: list[Delta] | EngineDeadError) -> None:
        try:
            event_loop.call_soon_threadsafe(events.put_nowait, item)
        except RuntimeError:
            # The event loop was closed with the stream still open: nobody waits any more.
            frontend.abandon(list(live))

    frontend.submit(requests, deliver)
    try:
        while live:
            deltas = await events.get()
            if isinstance(deltas, EngineDeadError):
                raise deltas
            live.difference_update(delta.rid for delta in deltas if delta.finish)
            yield deltas
    finally:
        frontend.abandon(list(live))
