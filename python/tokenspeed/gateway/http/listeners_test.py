# SPDX-License-Identifier: MIT
"""Ports beside the main one, log files, and lines of requests."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.processes import free_port, python_environment
from tokenspeed.config.flags import FlagError
from tokenspeed.config.gateway import parse_launch
from tokenspeed.gateway.http.logs import LogsUnwritable, configure_logs
from tokenspeed.gateway.testing.fake_engine import replying
from tokenspeed.gateway.testing.running import RunningGateway, ids

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
WORKER = ["--worker-urls", "ipc:///a"]


def status(port: int, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_operators_have_a_port_of_their_own_and_probes_answer_on_all() -> None:
    admin, health = free_port(), free_port()
    words = ["--admin-port", str(admin), "--admin-host", "127.0.0.1", "--health-check-port", str(health)]
    with RunningGateway([replying(ids("a"))], [*words, "--api-key", "k"]) as gateway:
        key = {"authorization": "Bearer k"}
        operators = ["/workers", "/get_loads", f"/workers/{gateway.service.router.workers[0].id}"]
        assert [status(gateway.port, path, headers=key) for path in operators] == [404, 404, 404]
        assert status(gateway.port, "/flush_cache", "POST", key) == 404
        assert [status(admin, path, headers=key) for path in operators] == [200, 200, 200]
        assert status(admin, "/flush_cache", "POST", key) == 200
        assert [status(admin, path) for path in operators] == [401, 401, 401]
        assert status(gateway.port, "/loads", headers=key) == status(admin, "/loads", headers=key) == 200
        for port in (gateway.port, admin, health):
            assert [status(port, path) for path in ("/health", "/liveness", "/readiness")] == [200, 200, 200]
        assert status(admin, PATH, "POST", key) == status(health, "/workers", headers=key) == 404
        assert "/workers" not in gateway.get("/openapi.json")[1]["paths"]


def test_a_port_that_is_taken_and_a_host_without_a_port_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}"):
            RunningGateway([], ["--admin-host", "127.0.0.1", "--admin-port", port], num_workers=1).__enter__()
    with pytest.raises(FlagError, match="--admin-host: it needs --admin-port"):
        parse_launch([*WORKER, "--admin-host", "127.0.0.1"])


def test_a_request_has_a_line_with_the_fields_that_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenspeed.gateway.access")
    fields = ["--access-log-fields", "client_addr,worker", "user_agent", "response_bytes", "request_bytes"]
    with RunningGateway([replying(ids("hello"))], fields) as gateway:
        caplog.clear()
        _, headers, body = gateway.request("POST", PATH, CHAT, {"user-agent": 'me" status=500 "', "x-request-id": "r1"})
        gateway.request("GET", "/nowhere")
        url = gateway.urls[0]
        assert headers["x-smg-routed-worker-id"] == gateway.service.router.workers[0].id
    lines = [record for record in caplog.records if record.name == "tokenspeed.gateway.access"]
    first = lines[0].fields  # type: ignore[attr-defined]
    assert (first["request_id"], first["method"], first["path"], first["status"]) == ("r1", "POST", PATH, 200)
    assert (first["client_addr"], first["worker"]) == ("127.0.0.1", url)
    assert (first["response_bytes"], first["request_bytes"]) == (len(body), len(json.dumps(CHAT)))
    assert "forwarded_for" not in first and 'user_agent="me\\" status=500 \\""' in lines[0].getMessage()
    assert lines[1].fields["status"] == 404 and lines[1].fields["worker"] == ""  # type: ignore[attr-defined]


def test_without_the_flag_requests_have_no_lines_and_streams_tell_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tokenspeed.gateway.access")
    with RunningGateway([replying(ids("hello"))]) as gateway:
        _, headers, _ = gateway.request("POST", PATH, {**CHAT, "stream": True})
        assert headers["x-smg-routed-worker-id"] == gateway.service.router.workers[0].id
    assert not [record for record in caplog.records if record.name == "tokenspeed.gateway.access"]


@pytest.mark.parametrize(
    ("word", "message"), [("tenant", "tenant is not known here"), ("colour", "'colour' is not one of client_addr")]
)
def test_a_field_that_nobody_knows_is_refused(word: str, message: str) -> None:
    with pytest.raises(FlagError, match=f"--access-log-fields: {message}"):
        parse_launch([*WORKER, "--access-log-fields", "client_addr", word])


def test_lines_go_to_a_file_too_and_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    code = (
        "import sys, logging; from tokenspeed.config.gateway import parse_launch;"
        "from tokenspeed.gateway.http.logs import configure_logs, log_access;"
        f"configure_logs(parse_launch({WORKER!r} + sys.argv[1:]).logs);"
        "logging.info('hello'); log_access({'path': '/x', 'status': 200})"
    )
    folder = tmp_path / "new" / "logs"
    words = ["--log-dir", str(folder), "--log-json"]
    env = python_environment()
    done = subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, timeout=60)
    (file,) = folder.iterdir()
    assert re.fullmatch(r"gateway-\d+\.log", file.name)
    assert file.read_text() == done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"] for line in lines] == ["hello", 'request path="/x" status=200']
    assert (lines[1]["path"], lines[1]["status"]) == ("/x", 200)
    with pytest.raises(LogsUnwritable, match=r"--log-dir: .*exists"):
        configure_logs(parse_launch([*WORKER, "--log-dir", str(file)]).logs)
