# SPDX-License-Identifier: MIT
"""A real gateway on a loopback port, on its own thread, with a small tokenizer made here. For tests only.

The tokenizer spells every byte as one token (ids 3 to 258, in the order of byte values), so that a test can write
answers as text: `ids("Paris")`. The end token is `END_TOKEN` of the scripted engine.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import Any

import tokenizers

from tokenspeed.config.gateway import parse_launch
from tokenspeed.gateway.app import gateway
from tokenspeed.gateway.http.service import Service
from tokenspeed.gateway.testing.fake_engine import END_TOKEN, FakeEngine, Script
from tokenspeed.gateway.text.vocabulary import byte_characters

END = "<end>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% if not (loop.last and m['role'] == "
    "'assistant') %}{{ '<end>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A `tokenizer.json` with one token a byte, the end token, and a chat template."""
    vocabulary = {character: token_id(byte) for character, byte in byte_characters().items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<pad>": 0, "<bos>": 1, END: END_TOKEN, **vocabulary}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def token_id(byte: int) -> int:
    """The token of a byte."""
    return byte + 3


def ids(text: str) -> list[int]:
    """The tokens of a text."""
    return [token_id(byte) for byte in text.encode()]


class RunningGateway:
    """A context manager: a gateway, and for each script a worker behind it.

    `flags` are flags of `smg launch`; `scripts` may be empty, and workers are then started by the test on `urls`.
    """

    def __init__(self, scripts: Sequence[Script], flags: Sequence[str] = (), num_workers: int | None = None) -> None:
        self._scripts = scripts
        self._flags = flags
        self._num_workers = len(scripts) if num_workers is None else num_workers
        self._folder = tempfile.TemporaryDirectory(prefix="gw")
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0
        self.service: Service
        self.engines: list[FakeEngine] = []
        self.urls = [f"ipc://{self._folder.name}/lane/w{i}" for i in range(self._num_workers)]

    def __enter__(self) -> RunningGateway:
        model = Path(self._folder.name) / "model"
        model.mkdir()
        write_tokenizer(model)
        self._argv = ["--worker-urls", *self.urls, "--model-path", str(model), "--host", "127.0.0.1", "--port", "0"]
        self._argv += ["--history-path", f"{self._folder.name}/history.sqlite"]
        self._thread.start()
        if not self._started.wait(20) or self._failure is not None:
            raise RuntimeError(f"the gateway did not start: {self._failure}")
        self.engines = [FakeEngine(url, script) for url, script in zip(self.urls, self._scripts)]
        if self.engines:
            self.wait_ready(len(self.engines))
        return self

    def __exit__(self, *exception: object) -> None:
        for engine in self.engines:
            engine.stop()
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(20)
        self._folder.cleanup()

    def wait_ready(self, num_workers: int) -> None:
        """Wait until so many workers are ready."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.get("/readiness")[1].get("workers_ready") == num_workers:
                return
            time.sleep(0.01)
        raise TimeoutError(f"{num_workers} workers did not become ready")

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """(status, JSON) of a GET."""
        status, _, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """(status, JSON) of a POST; `body` is JSON unless it is bytes already."""
        status, _, answer = self.request("POST", path, body, headers)
        return status, json.loads(answer)

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers with lower-case names, body) of any request."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url(path), data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return answer.status, _lower(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, _lower(error.headers), error.read()

    def stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """The events of a streaming POST, without `data: `."""
        _, _, answer = self.request("POST", path, {**body, "stream": True})
        blocks = answer.decode().split("\n\n")
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]

    def send_only(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A socket on which a POST has been sent; the test reads from it, or leaves."""
        data = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock

    def url(self, path: str) -> str:
        """The address of a path."""
        return f"http://127.0.0.1:{self.port}{path}"

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            self._started.set()
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        async with gateway(parse_launch([*self._argv, *self._flags])) as (service, port):
            self.service, self.port = service, port
            self._started.set()
            await self._done.wait()


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
