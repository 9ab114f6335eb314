# SPDX-License-Identifier: MIT
"""Bad input: the status, the code and the field; and after each, the next request works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server import Server

LIMIT = 2048  # conftest's --max-model-len


def chat(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0}
    body.update(changes)
    return {key: value for key, value in body.items() if value is not ...}


INVALID = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"stop": [1]}, "stop"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"frequency_penalty": 9}, "frequency_penalty"),
    ({"messages": []}, "messages"),
    ({"messages": ...}, "messages"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"seed": 1.5}, "seed"),
    ({"min_p": 2.0}, "min_p"),
    ({"no_such_parameter_anywhere": 1, "use_beam_search": True}, "use_beam_search"),
]


@pytest.mark.parametrize(("changes", "field"), INVALID, ids=[field + str(i) for i, (_, field) in enumerate(INVALID)])
def test_an_invalid_field_is_400_with_its_name_and_a_code(server: Server, changes: dict[str, Any], field: str) -> None:
    status, answer = server.post("/v1/chat/completions", chat(**changes))
    assert status == 400, answer
    assert field in (answer["error"]["param"] or "") and answer["error"]["code"], answer
    assert server.post("/v1/chat/completions", chat())[0] == 200


def test_a_body_that_is_not_json_is_400(server: Server) -> None:
    for body in (b"{", b"", b"[1]", b'{"messages": nan}', b"\xff\xfe"):
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 400 and answer["error"]["code"], answer
    assert server.post("/v1/chat/completions", chat())[0] == 200


def test_an_unknown_model_is_404_by_name(server: Server) -> None:
    status, answer = server.post("/v1/chat/completions", chat(model="gpt-17"))
    assert status == 404 and answer["error"]["code"] == "model_not_found" and "gpt-17" in answer["error"]["message"]


def test_an_unknown_path_is_404(server: Server) -> None:
    status, answer = server.post("/v1/chat/competions", chat())
    assert status == 404 and answer["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("asked", [..., 8])
def test_prompts_around_the_context_limit(server: Server, asked: Any) -> None:
    def complete(num_prompt_tokens: int) -> tuple[int, Any]:
        body = {"prompt": [100] * num_prompt_tokens, "temperature": 0, "ignore_eos": True}
        if asked is not ...:
            body["max_tokens"] = asked
        return server.post("/v1/completions", body)

    room = 1 if asked is ... else asked
    for excess in (-1, 0):
        status, answer = complete(LIMIT - room + excess)
        assert status == 200, answer
        expected = room - excess if asked is ... else asked  # a default is cut to the room that is left
        assert answer["usage"]["completion_tokens"] == expected
    for excess in (1, 2, 5000):
        status, answer = complete(LIMIT - room + excess)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
        assert str(LIMIT) in answer["error"]["message"] and str(LIMIT - room + excess) in answer["error"]["message"]
    assert complete(4)[0] == 200


def test_an_empty_prompt_and_a_token_outside_the_vocabulary_are_400(server: Server) -> None:
    for prompt in ("", [], [10**7], [-1]):
        status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        assert status == 400 and answer["error"]["param"] == "prompt", (prompt, answer)
    assert server.post("/v1/completions", {"prompt": "ok", "max_tokens": 2})[0] == 200
