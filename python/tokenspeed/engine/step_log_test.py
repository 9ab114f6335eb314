# SPDX-License-Identifier: MIT
"""Every number of a finish line and of the batch lines, over histories that are known to the millisecond."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from tokenspeed.engine.loop_test import Bench
from tokenspeed.engine.messages import Abort, End
from tokenspeed.observability.request_stats import RequestStats

STEP_S = 0.010
START_TS = 1_700_000_000.0


class History:
    """A loop whose steps take 10 ms each, by a clock that nothing else moves; and the lines that it wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.now = START_TS
        self._caplog = caplog
        monkeypatch.setattr("time.time", lambda: self.now)
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        caplog.set_level(logging.INFO, "tokenspeed.engine")

    def bench(self, depth: int = 0, num_blocks: int = 65) -> Bench:
        bench = Bench(depth, num_blocks=num_blocks)
        bench.executor.on_wait = lambda: self.passes(STEP_S)
        return bench

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def lines(self, begins: str) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if r.getMessage().startswith(begins)]

    def stats(self, rid: str) -> RequestStats:
        """Read back from the one line of the request."""
        (line,) = self.lines(f"Req: {rid} Finish! ")
        found = re.fullmatch(rf"Req: {rid} Finish! (RequestStats\(.*\))", line)
        assert found, line
        stats: Any = eval(found.group(1), {"RequestStats": RequestStats})
        assert isinstance(stats, RequestStats)
        return stats


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> History:
    return History(monkeypatch, caplog)


def test_a_prompt_in_three_chunks_is_timed_from_its_arrival_to_its_last_token(history: History) -> None:
    bench = history.bench()
    bench.loop.pause("keep")
    bench.add("a", num_prompt=70).steps(1)
    history.passes(1.5)
    bench.loop.resume()
    bench.steps(9)
    assert history.stats("a") == RequestStats(
        status="finished",
        reason="length",
        prompt_tokens=70,
        cache_tokens=0,
        output_tokens=6,
        cache_hit_rate=0.0,
        queue_ms=1500.0,
        prefill_ms=30.0,  # three chunks of at most 32 tokens
        ttft_ms=1530.0,
        total_ms=1580.0,  # and five tokens more
        preempt_ms=0.0,
        preempt_count=0,
        decode_tps=100.0,
        acc_len=None,
        acc_rate=None,
        recv_ts=START_TS,
        commit_ts=START_TS + 1.5,
        finish_ts=START_TS + 1.58,
    )


def test_a_prompt_that_was_seen_before_says_what_came_from_the_cache(history: History) -> None:
    bench = history.bench().add("a", num_prompt=70).steps(10).add("b", num_prompt=70)
    bench.steps(8)
    stats = history.stats("b")
    assert (stats.cache_tokens, stats.cache_hit_rate) == (69, 0.9857)
    assert (stats.prefill_ms, stats.ttft_ms, stats.prompt_tokens) == (10.0, 10.0, 70)


def test_choices_of_one_prompt_have_a_line_each_and_all_but_one_find_it_computed(history: History) -> None:
    bench = history.bench()
    for choice in ("a-0", "a-1", "a-2"):
        bench.add(choice, num_prompt=70)
    bench.steps(20)
    assert sorted(history.stats(f"a-{n}").cache_tokens for n in range(3)) == [0, 64, 64]
    assert [history.stats(f"a-{n}").output_tokens for n in range(3)] == [6, 6, 6]


@pytest.mark.parametrize("depth", [0, 1])
def test_gathering_tokens_for_a_stream_changes_no_number(history: History, depth: int) -> None:
    bench = history.bench(depth)
    bench.add("a", stream_interval=1).steps(10).add("b", stream_interval=4).steps(10)
    one, four = history.stats("a"), history.stats("b")
    assert one.output_tokens == four.output_tokens == 6
    assert (one.ttft_ms, one.total_ms, one.decode_tps) == (four.ttft_ms, four.total_ms, four.decode_tps)


def test_the_prompt_of_another_delays_a_decode_once_for_all_of_its_chunks(history: History) -> None:
    bench = history.bench().add("a", max_new_tokens=20).steps(3).add("b", num_prompt=70, max_new_tokens=2)
    bench.steps(6).add("c", num_prompt=10, max_new_tokens=2).steps(20)
    stats = history.stats("a")
    assert (stats.preempt_count, stats.preempt_ms) == (2, 40.0)
    assert (history.stats("b").preempt_count, stats.output_tokens) == (0, 20)


def test_who_is_aborted_says_how_far_it_came(history: History) -> None:
    bench = history.bench().add("decoding", max_new_tokens=50).steps(3)
    bench.loop.pause("keep")
    bench.add("waiting").add("compiling", json_schema="{}").steps(1)
    bench.desk.commands.append(Abort(["decoding", "waiting", "compiling"]))
    bench.steps(1)
    decoding, waiting, compiling = (history.stats(rid) for rid in ("decoding", "waiting", "compiling"))
    assert {s.status for s in (decoding, waiting, compiling)} == {"aborted"}
    assert {s.reason for s in (decoding, waiting, compiling)} == {"abort"}
    assert (decoding.output_tokens, decoding.ttft_ms, decoding.decode_tps) == (3, 10.0, 100.0)
    for stats in (waiting, compiling):
        assert (stats.prompt_tokens, stats.output_tokens) == (4, 0)
        assert (stats.queue_ms, stats.prefill_ms, stats.ttft_ms, stats.decode_tps, stats.commit_ts) == (None,) * 5
    bench.backend.go.set()


def test_a_text_that_is_complete_ends_its_request_by_a_stop(history: History) -> None:
    bench = history.bench().add("a", max_new_tokens=50).steps(3)
    bench.desk.commands.append(End(["a", "nobody"]))
    bench.steps(2)
    stats = history.stats("a")
    assert (stats.status, stats.reason, stats.output_tokens) == ("finished", "stop", 3)
    samples = {s.name: s.value for f in bench.metrics.metrics.registry.collect() for s in f.samples}
    assert samples["tokenspeed:request_success_total"] == 1
    assert bench.loop.load().active_blocks == 0
    bench.scheduler.check()


def test_a_request_that_lost_its_blocks_and_came_back_is_one_request(history: History) -> None:
    bench = history.bench(num_blocks=13)
    bench.add("a", num_prompt=30, max_new_tokens=50).add("b", num_prompt=29, max_new_tokens=50).steps(200)
    assert sum(bench.scheduler.stats(request_id).num_retractions for request_id in (1, 2)) > 0
    for rid, num_prompt in (("a", 30), ("b", 29)):
        stats = history.stats(rid)
        assert (stats.reason, stats.prompt_tokens, stats.output_tokens) == ("length", num_prompt, 50)
        assert stats.queue_ms is not None and stats.ttft_ms is not None and stats.queue_ms <= stats.ttft_ms <= 50
    late = max((history.stats(rid) for rid in "ab"), key=lambda stats: stats.total_ms)
    assert late.total_ms > 500 + 100  # its own tokens, and the wait for the other's
    lines = history.lines("Prefill batch.") + history.lines("Mix batch.")
    # What "b" shares with "a" counts when it begins, and not again when somebody comes back.
    assert len(lines) > 2 and sum("#cached-token: 24" in line for line in lines) == 1
    assert sum("#cached-token: 0" in line for line in lines) == len(lines) - 1


def test_batch_lines_tell_what_each_step_computed(history: History) -> None:
    bench = history.bench().add("a", max_new_tokens=45).steps(2)
    bench.add("b", num_prompt=70, max_new_tokens=2).steps(60)
    assert history.lines("Prefill batch.") == [
        "Prefill batch. #dp-rank: 0, #new-seq: 1, #new-token: 4, #cached-token: 0, #running-req: 1, #queue-req: 0"
    ]
    assert history.lines("Mix batch.") == [
        f"Mix batch. #dp-rank: 0, #new-seq: 1, #new-token: {n}, #cached-token: 0, #running-req: 2, #queue-req: 0"
        for n in (31, 31, 8)
    ]
    # The fortieth step that decodes: "a" has 41 tokens, "b" has ended.
    assert history.lines("Decode batch.") == [
        "Decode batch. #dp-rank: 0, #running-req: 1, avg_seq_len: 44.0, #pages(active/cached/total): 6/9/64, "
        "page ratio: 0.09, gen throughput (token/s): 105.00, #queue-req: 0"
    ]


def test_decode_lines_come_every_forty_steps_whatever_the_pauses_between(history: History) -> None:
    bench = history.bench()
    for number in range(10):
        bench.add(f"r{number}", num_prompt=4 + number, max_new_tokens=9).steps(12)
        history.passes(60.0)
    lines = history.lines("Decode batch.")
    assert len(lines) == 2 and all("gen throughput (token/s): 100.00" in line for line in lines)


def test_every_admitted_request_ends_with_one_line_and_is_counted_once(history: History) -> None:
    bench = history.bench().add("refused", temperature=-1.0).add("a")
    bench.add("bad", regex="bad").steps(1)
    bench.backend.go.set()
    for _ in range(2000):
        bench.steps(1)
        if history.lines("Req: bad"):
            break
    bench.steps(10)
    assert history.stats("bad").status == "aborted" and history.stats("a").status == "finished"
    assert history.lines("Req: refused") == []
    samples = {s.name: s.value for f in bench.metrics.metrics.registry.collect() for s in f.samples}
    assert (samples["tokenspeed:num_requests_total"], samples["tokenspeed:request_success_total"]) == (2, 1)
