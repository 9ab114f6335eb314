# SPDX-License-Identifier: MIT
"""Questions that every gateway in front of our engine must answer alike; AssertionError where it does not."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

from tests.support.peers import Http
from tests.support.processes import wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Asker:
    """Asks one server about its one model, greedily."""

    def __init__(self, http_port: int) -> None:
        self.http = Http(http_port)

    @property
    def model(self) -> str:
        return str(self.http.get("/v1/models")["data"][0]["id"])

    def has_model(self) -> bool:
        return self.http.status("/v1/models") == 200 and bool(self.http.get("/v1/models")["data"])

    def serves(self) -> bool:
        """Whether a token comes: ready, registered, and with a tokenizer."""
        ready = self.http.status("/readiness") == 200
        return ready and self.has_model() and self.chat_status(max_tokens=1) == 200

    def chat(self, **fields: Any) -> dict[str, Any]:
        status, answer = self.http.post("/v1/chat/completions", self._body(fields))
        assert status == 200, answer
        return dict(answer)

    def chat_status(self, **fields: Any) -> int:
        return self.http.post("/v1/chat/completions", self._body(fields))[0]

    def chat_events(self, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that ends with [DONE]."""
        response = self.open_stream(**fields)
        lines = [line.decode().strip() for line in response]
        data = [line[6:] for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(item) for item in data[:-1]]

    def open_stream(self, **fields: Any) -> http.client.HTTPResponse:
        """The response of a streamed chat; closing it is how a client leaves."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http.port, timeout=120)
        body = json.dumps(self._body(fields | {"stream": True}))
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0} | fields


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def joined(events: list[dict[str, Any]]) -> str:
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def check_chat(ask: Asker) -> str:
    """A whole answer and a streamed one are the same text; usage counts it."""
    answer = ask.chat()
    assert "Paris" in text_of(answer)
    assert answer["usage"]["completion_tokens"] > 0
    events = ask.chat_events()
    assert joined(events) == text_of(answer)
    finishes = [e["choices"][0].get("finish_reason") for e in events if e["choices"]]
    assert [finish for finish in finishes if finish] == [answer["choices"][0]["finish_reason"]]
    return text_of(answer)


def check_stop_strings(ask: Asker) -> None:
    whole = text_of(ask.chat())
    stopped = ask.chat(stop=["Paris"])
    assert text_of(stopped) == whole[: whole.index("Paris")]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert joined(ask.chat_events(stop=["Paris"])) == text_of(stopped)


def check_logprobs(ask: Asker) -> None:
    answer = ask.chat(logprobs=True, max_tokens=8, ignore_eos=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(-5.0 < entry["logprob"] <= 0.0 for entry in entries)


def cached_tokens(answer: dict[str, Any]) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def check_flush(ask: Asker) -> None:
    """A prompt that is asked twice is cached, until the gateway's flush."""
    prompt = [{"role": "user", "content": "Count to three. " * 20}]
    ask.chat(messages=prompt, max_tokens=1)
    assert cached_tokens(ask.chat(messages=prompt, max_tokens=1)) > 0
    status, answer = ask.http.post("/flush_cache", {})
    assert (status, answer["workers_flushed"]) == (200, 1), answer
    assert cached_tokens(ask.chat(messages=prompt, max_tokens=1)) == 0


def check_disconnect(ask: Asker, engine_is_idle: Callable[[], bool]) -> None:
    """A client that leaves in the middle frees what its request held."""
    response = ask.open_stream(max_tokens=1500, ignore_eos=True)
    for _ in range(4):
        response.readline()
    assert not engine_is_idle()
    response.close()
    wait_until(engine_is_idle, 20)
