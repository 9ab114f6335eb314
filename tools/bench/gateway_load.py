# SPDX-License-Identifier: MIT
"""Clients of a gateway under measurement: connections that stay open and send one chat request after another.

An answer is read to its last byte and judged by little: its status and its end. What a client costs does not count,
since only the gateway's processor time is measured; but a client must never be what the gateway waits for.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """One kind of request: `words` of prompt, `max_tokens` of answer, streamed or whole."""

    model: str
    words: int
    max_tokens: int
    stream: bool

    def body(self, number: int, text: str) -> bytes:
        """The JSON of request `number`, whose prompt begins at another place of `text`."""
        words = text.split()
        start = number * 7 % len(words)
        prompt = " ".join((words * 3)[start : start + self.words])
        messages = [
            {"role": "system", "content": "You are an assistant who answers shortly and exactly."},
            {"role": "user", "content": f"{number}: {prompt}"},
        ]
        fields = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens, "temperature": 0.7}
        return json.dumps({**fields, "stream": self.stream}).encode()


class BadAnswer(RuntimeError):
    """The gateway did not answer as it should; says what came."""


async def run(port: int, ask: Ask, num_streams: int, per_stream: int, text: str) -> int:
    """`num_streams` connections send `per_stream` requests each; the number of requests. Raises `BadAnswer`."""
    tasks = [_client(port, ask, per_stream, n * per_stream, text) for n in range(num_streams)]
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(task)
    return num_streams * per_stream


async def _client(port: int, ask: Ask, count: int, first: int, text: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in range(first, first + count):
        body = ask.body(number, text)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await _answer(reader)
        if not answer.endswith(b"data: [DONE]\n\n" if ask.stream else b"}"):
            raise BadAnswer(f"an answer ended in {answer[-80:]!r}")
    writer.close()
    await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise BadAnswer(f"{head!r} {await reader.read(1000)!r}")
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.split(b":")[1]))
    body = b""
    while size := int(await reader.readline(), 16):
        body = (body + await reader.readexactly(size))[-200:]
        await reader.readline()
    await reader.readline()
    return body
