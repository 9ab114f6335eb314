# SPDX-License-Identifier: MIT
"""How workers are watched and how they leave: health checks, start, TLS, time limits of calls, removal, ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_until
from tokenspeed.config.flags import FlagError
from tokenspeed.config.gateway import parse_launch
from tokenspeed.config.gateway_workers import GrpcConfig
from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.fake_servicer import FakeServicer
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.gateway.testing.tls import CA, CERTIFICATE, KEY, write_tls
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.base import Lane, LaneOptions, LaneState
from tokenspeed.rpc.lane.rank import Rank
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def slow(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    for _ in range(1000):
        yield Step(ids("z"), delay_s=0.02)


@pytest.fixture
def servicer() -> Iterator[FakeServicer]:
    servicer = FakeServicer(replying(ids("fine")))
    yield servicer
    servicer.stop()


def serving(url: str, *words: str) -> RunningGateway:
    return RunningGateway([], ["--worker-urls", url, "--retry-max-retries", "2", *words], num_workers=0)


def state(gateway: RunningGateway) -> str:
    return str(gateway.get("/workers")[1]["workers"][0]["state"])


# ---- health ----------------------------------------------------------------------------------------------------------

QUICK = ["--health-check-interval-secs", "0.05"]


def test_failed_checks_in_a_row_take_a_worker_out_and_good_ones_bring_it_back(servicer: FakeServicer) -> None:
    words = [*QUICK, "--health-failure-threshold", "4", "--health-success-threshold", "5"]
    with serving(servicer.url, *words) as gateway:
        gateway.wait_ready(1)
        before = servicer.num_checks
        servicer.is_healthy = False
        wait_until(lambda: gateway.get("/readiness")[0] == 503)
        assert servicer.num_checks >= before + 4
        worker = gateway.get("/workers")[1]["workers"][0]
        assert worker["state"] == "stalled"
        assert "4 health checks failed in a row: out of sorts" in worker["reason"]
        before = servicer.num_checks
        servicer.is_healthy = True
        gateway.wait_ready(1)
        assert servicer.num_checks >= before + 5
        assert gateway.post(PATH, CHAT)[0] == 200
        _, _, metrics = gateway.request("GET", "/metrics")
        counts = [line for line in metrics.decode().splitlines() if line.startswith("smg_worker_health_checks_total{")]
        assert {line.split('result="')[1].split('"')[0] for line in counts} == {"success", "failure"}


def test_checks_can_be_switched_off(servicer: FakeServicer) -> None:
    with serving(servicer.url, *QUICK, "--disable-health-check", "--load-monitor-interval", "0.02") as gateway:
        gateway.wait_ready(1)
        checked, asked = servicer.num_checks, servicer.num_loads
        wait_until(lambda: servicer.num_loads >= asked + 10)
        assert servicer.num_checks == checked == 1


def test_loads_are_not_asked_for_where_nobody_looks_at_them(servicer: FakeServicer) -> None:
    idle = ["--disable-load-monitoring", "--policy", "round_robin", "--disable-worker-overload-protection"]
    with serving(servicer.url, *QUICK, "--load-monitor-interval", "0.02", *idle) as gateway:
        gateway.wait_ready(1)
        checked = servicer.num_checks
        wait_until(lambda: servicer.num_checks >= checked + 5)
        assert servicer.num_loads == 0
    asks = [[], ["--engine-metrics", *idle], idle[:3], [*idle[:1], *idle[3:]]]
    for words in asks:
        assert parse_launch(["--worker-urls", servicer.url, *words]).grpc.load_interval_s == 1.0


def test_a_worker_that_is_lost_is_removed_where_that_is_asked_for(servicer: FakeServicer) -> None:
    other = FakeServicer(replying(ids("other")))
    with serving(servicer.url, "--worker-urls", other.url, "--remove-unhealthy-workers") as gateway:
        gateway.wait_ready(2)
        servicer.stop()
        wait_until(lambda: [w["url"] for w in gateway.get("/workers")[1]["workers"]] == [other.url])
        assert gateway.post(PATH, CHAT)[0] == 200
    other.stop()


def test_a_worker_that_never_came_is_not_removed() -> None:
    with serving("grpc://127.0.0.1:1", "--remove-unhealthy-workers") as gateway:
        wait_until(lambda: "UNAVAILABLE" in gateway.get("/workers")[1]["workers"][0]["reason"])
        assert state(gateway) == "absent"


def test_a_deleted_worker_drains_for_as_long_as_is_asked_for(servicer: FakeServicer) -> None:
    with serving(servicer.url, "--drain-settle-secs", "0.5") as gateway:
        gateway.wait_ready(1)
        begun_s = time.monotonic()
        gateway.request("DELETE", "/workers/" + gateway.get("/workers")[1]["workers"][0]["id"])
        wait_until(lambda: gateway.get("/workers")[1]["total"] == 0)
        assert time.monotonic() - begun_s >= 0.5


# ---- start, TLS, time limits -----------------------------------------------------------------------------------------


def test_a_worker_that_does_not_register_in_time_is_given_up() -> None:
    words = ["--worker-startup-timeout-secs", "0.2", "--worker-startup-check-interval", "0.01"]
    with serving("grpc://127.0.0.1:1", *words) as gateway:
        reason = lambda: gateway.get("/workers")[1]["workers"][0]["reason"]  # noqa: E731
        wait_until(lambda: reason() == "it did not register in 0.2 s")


def test_a_worker_is_called_first_after_the_delay(servicer: FakeServicer) -> None:
    begun_s = time.monotonic()
    with serving(servicer.url, "--worker-startup-delay", "0.5") as gateway:
        gateway.wait_ready(1)
        assert time.monotonic() - begun_s >= 0.5


def test_a_call_that_takes_too_long_is_504_at_once_and_ends_on_the_worker() -> None:
    servicer = FakeServicer(slow)
    with serving(servicer.url, "--grpc-request-timeout-secs", "0.3") as gateway:
        gateway.wait_ready(1)
        status, answer = gateway.post(PATH, CHAT)
        assert (status, answer["error"]["code"]) == (504, "call_upstream_timeout")
        assert len(servicer.requests) == 1
        wait_until(lambda: bool(servicer.aborted) and servicer.num_active == 0)
    servicer.stop()


def test_workers_with_tls_are_reached_by_those_who_know_them_and_are_known(tmp_path: Path) -> None:
    servicer = FakeServicer(replying(ids("secret")), tls=(CA, KEY, CERTIFICATE))
    ca, certificate, key = write_tls(tmp_path)
    own = ["--client-cert-path", certificate, "--client-key-path", key]
    with serving(servicer.url, "--ca-cert-paths", ca, *own) as gateway:
        gateway.wait_ready(1)
        assert gateway.post(PATH, CHAT)[1]["choices"][0]["message"]["content"] == "secret"
        assert gateway.get("/workers")[1]["workers"][0]["connection_mode"] == "grpc"
    for words in (own, ["--ca-cert-paths", ca], []):
        with serving(servicer.url, *words) as gateway:
            wait_until(lambda: "UNAVAILABLE" in gateway.get("/workers")[1]["workers"][0]["reason"])
    with serving(servicer.url.replace("grpcs", "grpc")) as gateway:
        wait_until(lambda: "UNAVAILABLE" in gateway.get("/workers")[1]["workers"][0]["reason"])
    servicer.stop()


def test_files_of_certificates_are_read_at_the_start(tmp_path: Path) -> None:
    ca, certificate, _ = write_tls(tmp_path)
    (tmp_path / "no.pem").write_text("hello")
    for words, message in (
        (["--client-cert-path", certificate], "--client-cert-path: the certificate and its key"),
        (["--ca-cert-paths", ca, str(tmp_path / "none")], "--ca-cert-paths: .* cannot be read"),
        (["--ca-cert-paths", str(tmp_path / "no.pem")], "--ca-cert-paths: .* is no PEM file"),
    ):
        with pytest.raises(FlagError, match=message):
            parse_launch(["--worker-urls", "grpcs://h:1", *words])
    assert parse_launch(["--worker-urls", "grpcs://h:1", "--ca-cert-paths", ca, certificate]).grpc.tls.ca == (
        CA + CERTIFICATE
    )


# ---- ranks -----------------------------------------------------------------------------------------------------------


class Ready(Lane):
    """A lane with ranks that were told their load."""

    def __init__(self, by_tokens: bool, blocks: list[int]) -> None:
        super().__init__("ipc:///a", LaneOptions(None, None, 1.0, None, GrpcConfig(), by_tokens), lambda *_: None)
        self.state = LaneState.READY
        for index, active in enumerate(blocks):
            rank = Rank(wire.identity_of(index))
            rank.response = wire.ReadyResponse(
                max_model_len=1, num_gpu_blocks=100, block_size=16, dtype="float32", vllm_version="x", world_size=1,
                data_parallel_size=1,
            )  # fmt: skip
            rank.on_load(1.0, 0, 0, active)
            self.ranks[rank.identity] = rank

    def give(self, num_tokens: int) -> int:
        """The rank that a prompt of so many tokens goes to."""
        rank = self._next_rank("r", is_known=False)
        rank.begin(1.0, num_tokens)
        return rank.index


def test_ranks_take_turns_by_requests_or_by_tokens() -> None:
    by_requests, by_tokens = Ready(False, [50, 0]), Ready(True, [50, 0])
    assert [by_requests.give(100) for _ in range(4)] == [0, 1, 0, 1]
    assert [by_tokens.give(300) for _ in range(4)] == [1, 1, 1, 0]  # 800 tokens against 0, 300, 600 and 900
    assert parse_launch(["--worker-urls", "ipc:///a", "--dp-minimum-tokens-scheduler"]).by_tokens


def test_a_rank_that_gives_nothing_while_requests_pile_up_is_wedged() -> None:
    rank = Rank(wire.identity_of(0))
    assert not rank.is_wedged(100.0, 3.0)
    rank.begin(10.0, 5)
    assert not rank.is_wedged(12.0, 3.0)
    assert rank.is_wedged(14.0, 3.0)  # it is one more than there were
    rank.on_rows(_rows(tokens=1), 14.0)
    assert not rank.is_wedged(20.0, 3.0)  # one, as there was
    rank.on_load(20.0, 1, 1, 0)
    assert rank.is_wedged(20.0, 3.0) and not rank.is_wedged(20.0, 7.0)
    rank.on_load(20.0, 1, 0, 0)
    for _ in range(3):
        rank.begin(20.0, 5)
    rank.on_rows(_rows(tokens=1), 20.0)
    assert rank.is_wedged(24.0, 3.0)  # four wait
    rank.on_rows(_rows(tokens=0), 24.0)
    assert rank.is_wedged(24.0, 3.0)  # a sign of life is no token


def test_a_ranks_rate_is_that_of_the_time_between_two_looks() -> None:
    rank = Rank(wire.identity_of(0))
    rank.measure(10.0)
    rank.on_rows(_rows(tokens=30), 10.5)
    rank.measure(10.2)
    assert rank.tokens_per_s == 0
    rank.measure(12.0)
    assert rank.tokens_per_s == 15
    rank.measure(13.0)
    assert rank.tokens_per_s == 0


def _rows(tokens: int) -> wire.BatchTokenIDOutSlim:
    return wire.BatchTokenIDOutSlim(
        rids=["a"], output_ids=[[1] * tokens], finished_reasons=[""], prompt_tokens=[1], completion_tokens=[1],
        cached_tokens=[0], output_token_logprobs_val=[[]], output_token_logprobs_idx=[[]],
    )  # fmt: skip
