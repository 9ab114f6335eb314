# SPDX-License-Identifier: MIT
"""Records: what is written is read, also while it is being written; backends behave alike and fail in words."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed.gateway.history.redis import RedisBackend
from tokenspeed.gateway.history.sqlite import SqliteBackend
from tokenspeed.gateway.history.store import Backend, BackendError, History, Key
from tokenspeed.gateway.http.errors import ApiError


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1"])
    for _ in range(500):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.01)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(10)


@pytest.fixture(params=["sqlite", "memory", "redis"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made: Backend
    if request.param == "redis":
        made = RedisBackend(request.getfixturevalue("redis_url"), 60.0, 5.0, 2)
    else:
        made = SqliteBackend(tmp_path / "a" / "h.sqlite" if request.param == "sqlite" else None, 60.0)
    yield made
    made.close()


def test_records_are_kept_by_kind_owner_and_id_in_the_order_of_their_first_writing(backend: Backend) -> None:
    for record_id in ("b", "a", "c"):
        backend.put(("k", "me", record_id), record_id.encode())
    backend.put(("k", "me", "a"), b"new")
    backend.put(("k", "you", "a"), b"yours")
    backend.put(("other", "me", "a"), b"other")
    assert backend.list("k", "me") == [("b", b"b"), ("a", b"new"), ("c", b"c")]
    assert backend.get(("k", "you", "a")) == b"yours"
    assert backend.delete(("k", "me", "b")) and not backend.delete(("k", "me", "b"))
    assert backend.get(("k", "me", "b")) is None
    assert [record_id for record_id, _ in backend.list("k", "me")] == ["a", "c"]


def test_a_file_outlives_its_process_and_old_records_go(tmp_path: Path) -> None:
    now = [1000.0]
    path = tmp_path / "h.sqlite"
    first = SqliteBackend(path, 60.0, now_s=lambda: now[0])
    first.put(("k", "", "old"), b"1")
    now[0] += 50
    first.put(("k", "", "new"), b"2")
    first.close()
    now[0] += 20
    second = SqliteBackend(path, 60.0, now_s=lambda: now[0])
    assert second.list("k", "") == [("new", b"2")]
    second.close()


def test_two_gateways_share_a_file(tmp_path: Path) -> None:
    one, two = (SqliteBackend(tmp_path / "h.sqlite", 60.0) for _ in range(2))
    one.put(("k", "", "a"), b"1")
    assert two.get(("k", "", "a")) == b"1"
    one.close()
    two.close()


class Slow:
    """A backend that waits for `gate` before it writes, and can be broken."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.broken = False
        self.records: dict[Key, bytes] = {}

    def put(self, key: Key, body: bytes) -> None:
        self.gate.wait(10)
        self._check()
        self.records[key] = body

    def get(self, key: Key) -> bytes | None:
        self._check()
        return self.records.get(key)

    def delete(self, key: Key) -> bool:
        return self.records.pop(key, None) is not None

    def list(self, kind: str, owner: str) -> list[tuple[str, bytes]]:
        return [(key[2], body) for key, body in self.records.items() if key[:2] == (kind, owner)]

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.broken:
            raise BackendError("out of order")


def test_what_is_being_written_is_read_and_closing_waits_for_it() -> None:
    slow = Slow()

    async def scenario() -> None:
        history = History(slow)
        history.put("k", "", "a", b"1")
        assert await history.get("k", "", "a") == b"1" and not slow.records
        slow.gate.set()
        assert await history.list("k", "") == [("a", b"1")]
        history.put("k", "", "b", b"2")
        await history.close()

    asyncio.run(scenario())
    assert len(slow.records) == 2


def test_a_broken_backend_is_a_503_for_who_reads_and_nothing_for_who_writes(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    slow.gate.set()
    slow.broken = True

    async def scenario() -> None:
        history = History(slow)
        history.put("k", "", "a", b"1")
        await history.settle()
        with pytest.raises(ApiError) as error:
            await history.get("k", "", "a")
        assert (error.value.status, error.value.code) == (503, "history_unavailable")

    asyncio.run(scenario())
    assert "out of order" in caplog.text


def test_a_place_that_cannot_be_opened_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BackendError, match=r"h\.sqlite"):
        SqliteBackend(tmp_path / "file" / "h.sqlite", 60.0)
    (tmp_path / "broken.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(BackendError, match="not a database"):
        SqliteBackend(tmp_path / "broken.sqlite", 60.0)
    with pytest.raises(BackendError):
        RedisBackend("redis://127.0.0.1:1/0", 60.0, 0.5, 2)


def test_memory_keeps_the_newest_of_a_kind_and_all_of_the_others() -> None:
    kept = SqliteBackend(None, 60.0, {"response": 3, "item:": 4})
    for number in range(6):
        kept.put(("response", "", f"r{number}"), b"{}")
        kept.put((f"item:c{number % 2}", "", f"i{number}"), b"{}")
        kept.put(("conversation", "", f"c{number}"), b"{}")
    kept.put(("response", "", "r4"), b"new")  # an update makes nothing younger
    assert [name for name, _ in kept.list("response", "")] == ["r3", "r4", "r5"]
    assert [name for kind in ("item:c0", "item:c1") for name, _ in kept.list(kind, "")] == ["i2", "i4", "i3", "i5"]
    assert len(kept.list("conversation", "")) == 6


def test_who_waits_for_the_writes_before_does_not_wait_for_those_after(tmp_path: Path) -> None:
    async def run() -> None:
        history = History(SqliteBackend(tmp_path / "h.sqlite", 60.0))
        writing = True

        async def keep_writing() -> None:
            while writing:
                if len(history._writers) < 3:  # there is always one
                    history.put("k", "", "theirs", b"x")
                await asyncio.sleep(0)

        writer = asyncio.create_task(keep_writing())
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert len(await history.list("k", "")) > 0
            await history.write("k", "", "mine", b"y")
        writing = False
        await writer
        assert await history.get("k", "", "mine") == b"y"
        await history.close()

    asyncio.run(run())
