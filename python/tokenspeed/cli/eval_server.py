# SPDX-License-Identifier: MIT
"""The server that `ts eval` asks: a client of OpenAI's completions and chat, and a `ts serve` of our own.

The client is made and used on one event loop and holds at most `concurrency` requests open. The own server is one child
process, ended by its own process id whatever happens; everything it prints goes to stderr behind a tag.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from tokenspeed.cli._proc import Child, describe_status, free_port

_POLL_S = 0.2
_STOP_S = 60.0


class ServerError(Exception):
    """What the server did instead of answering, in one line. `status`: of this command."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


class Client:
    """Requests to one server. Use as a context manager; `model` is set by `choose_model`."""

    def __init__(self, base_url: str, api_key: str | None, concurrency: int, timeout_s: float) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.model = ""

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def choose_model(self, name: str | None) -> None:
        """`name`, or the first model that the server lists. Raises ServerError if it does not answer."""
        listed = (await self._ask("GET", "/v1/models", None)).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not name and not (isinstance(first, dict) and first.get("id")):
            raise ServerError(f"{self._base_url}/v1/models lists no model; name one")
        self.model = name or str(first["id"] if first else "")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON answer, once a slot is free. Raises ServerError for anything but 200 with an object."""
        async with self._slots:
            return await self._ask("POST", path, {"model": self.model, **body})

    async def lines(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The lines of a streamed answer as they come; no slot is taken. Raises ServerError."""
        url = f"{self._base_url}{path}"
        try:
            async with self._session.post(url, json={"model": self.model, **body}) as response:
                if response.status != 200:
                    raise ServerError(f"{url}: HTTP {response.status}: {(await response.text(errors='replace'))[:300]}")
                async for line in response.content:
                    yield line
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            raise ServerError(f"{url}: {str(error) or type(error).__name__}") from None

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        url = f"{self._base_url}{path}"
        try:
            async with self._session.request(method, url, json=body) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise ServerError(f"{url}: HTTP {response.status}: {text[:300]}")
                answer = json.loads(text)
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            raise ServerError(f"{url}: {str(error) or type(error).__name__}") from None
        if not isinstance(answer, dict):
            raise ServerError(f"{url}: the answer is not a JSON object")
        return answer


@contextlib.contextmanager
def own_server(model: str | None, words: Sequence[str], timeout_s: float) -> Iterator[str]:
    """A ready `ts serve` and its address; ended when the block ends. Raises ServerError if it does not become ready."""
    port = free_port()
    # Quiet, so that a progress bar can be read; the last of two flags decides, and that is the user's.
    arguments = ["-m", "tokenspeed.cli.ts", "serve", *([model] if model else []), "--log-level", "warn", *words]
    child = Child("serve", [*arguments, "--host", "127.0.0.1", "--port", str(port)], sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(child, url, timeout_s)
        yield url
    finally:
        child.terminate()
        child.end(_STOP_S)


def _wait_ready(child: Child, url: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if (status := child.poll()) is not None:
            raise ServerError(f"ts serve ended before it was ready: {describe_status(status)}", max(status, 1))
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=5):
                return
        except OSError:  # refused, 503 or silent: not yet
            time.sleep(_POLL_S)
    raise ServerError(f"ts serve was not ready within {timeout_s:g} s")
