# SPDX-License-Identifier: MIT
"""The loop over the real scheduler and an executor with a script: order, overlap, ends, faults. No model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import tokenspeed_cc
from tokenspeed.config.constraint import Constraint
from tokenspeed.config.resolve import AdmissionConfig, GrammarConfig, LogConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.admission import Admission
from tokenspeed.engine.errors import EngineFault
from tokenspeed.engine.executor import StepTokens
from tokenspeed.engine.loop import EngineLoop, nothing
from tokenspeed.engine.messages import Abort, AbortAll, Add, Command, Connected, Control, StepOutput
from tokenspeed.engine.pending import Done, Pending
from tokenspeed.engine.records import RequestTable
from tokenspeed.engine.runner import StepWork
from tokenspeed.engine.step_log import StepLog
from tokenspeed.engine.step_metrics import StepMetrics
from tokenspeed.engine.step_ranges import NoRanges, step_ranges
from tokenspeed.grammar import CompiledGrammar, GrammarCompiler, GrammarError
from tokenspeed.observability.engine_metrics import EngineMetrics
from tokenspeed.observability.traces import Attributes, Span
from tokenspeed.sampling import NUMERICAL_ERROR, RowFailure

EOS = 99


class ScriptedExecutor:
    """Token of a request at sequence length n: script(slot's request, n). Remembers what was launched and settled."""

    def __init__(self, script: Callable[[int, int], int]) -> None:
        self.script = script
        self.events: list[str] = []
        self.slots: dict[int, int] = {}
        self.works: list[StepWork] = []
        self.failures: dict[tuple[int, int], RowFailure] = {}
        """By request and sequence length: rows without a token."""
        self.on_wait: Callable[[], None] = nothing
        """What passes while a step is waited for."""

    def launch(self, work: StepWork) -> Pending[StepTokens]:
        plan: Any = work.plan
        self.works.append(work)
        self.events.append(f"launch {plan.step_id}")
        lengths = (plan.context_lens + plan.query_lens).tolist()
        drawn = [self.script(request, length) for request, length in zip(plan.request_ids.tolist(), lengths)]
        token_ids = np.where(plan.samples, drawn, -1).astype(np.int32)[:, None]
        keys = enumerate(zip(plan.request_ids.tolist(), lengths))
        failures = [(row, self.failures[key]) for row, key in keys if key in self.failures]
        tokens = StepTokens(token_ids, plan.samples.astype(np.int32), None, None, None, None, [], failures)
        return Watched(tokens, plan.step_id, self.events, self.on_wait)

    def close(self) -> None:
        return


class Watched(Done[StepTokens]):
    def __init__(self, value: StepTokens, step_id: int, events: list[str], on_wait: Callable[[], None]) -> None:
        super().__init__(value)
        self._step_id, self._events, self._on_wait = step_id, events, on_wait

    def wait(self) -> StepTokens:
        self._events.append(f"settle {self._step_id}")
        self._on_wait()
        return super().wait()


class ScriptedBackend:
    """Compiles when it is told to; "bad" in a constraint is an error."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        assert self.go.wait(10)
        if "bad" in constraint.text:
            raise GrammarError("no such thing")
        return Anything()


class Anything:
    num_bytes = 1

    def matcher(self, stop_token_ids: Sequence[int]) -> Any:
        raise AssertionError("the scripted executor samples nothing")


class Desk:
    """A frontend with a script: commands to hand over at the next drain, and everything that was published."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.published: list[StepOutput] = []
        self.waits: list[float] = []

    def drain(self, timeout_s: float) -> list[Command]:
        self.waits.append(timeout_s)
        taken, self.commands = self.commands, []
        return taken

    def publish(self, output: StepOutput) -> None:
        self.published.append(output)

    def tokens(self, rid: str) -> list[int]:
        rows = [(output, output.rids.index(rid)) for output in self.published if rid in output.rids]
        return [token for output, row in rows for token in output.token_ids[row]]

    def ends(self, rid: str) -> list[str]:
        rows = [(output, output.rids.index(rid)) for output in self.published if rid in output.rids]
        return [output.finish[row] for output, row in rows if output.finish[row]]


class Bench:
    """A loop to step by hand."""

    def __init__(
        self,
        depth: int = 1,
        script: Callable[[int, int], int] = lambda request, n: (request + n) % 90,
        num_blocks: int = 65,
    ) -> None:
        config = tokenspeed_cc.SchedulerConfig(
            num_blocks=num_blocks,
            block_size=8,
            max_num_seqs=4,
            max_model_len=128,
            max_batched_tokens=32,
            chunked_prefill=True,
            overlap_depth=depth,
            verify_width=1,
            max_decode_gap_tokens=32,
            enable_prefix_caching=True,
            eos_token_ids=[EOS],
        )
        self.scheduler = tokenspeed_cc.Scheduler(config)
        self.executor = ScriptedExecutor(script)
        self.desk = Desk()
        self.backend = ScriptedBackend()
        requests = RequestTable()
        grammars = GrammarCompiler(GrammarConfig("xgrammar", 30.0, 0, True, 1, 2**20, 2), lambda: self.backend)
        self.metrics = StepMetrics(EngineMetrics("m", ""), self.scheduler, requests)
        admission = Admission(
            AdmissionConfig(100, 128, 1, 0, False, "xgrammar", False, 1), self.scheduler, requests, grammars
        )
        log = StepLog(LogConfig("error", True, 0, True, 40, 0), self.scheduler, requests, self.metrics)
        self.loop = EngineLoop(self.scheduler, self.executor, self.desk, admission, requests, log, depth)

    def add(self, rid: str, num_prompt: int = 4, **params: Any) -> Bench:
        values = {"max_new_tokens": 6, **params}
        prompt = (np.arange(num_prompt) % 90).astype(np.int32)
        self.desk.commands.append(Add(rid, prompt, SamplingParams(**values), priority=0, cache_salt=0))
        return self

    def steps(self, count: int) -> Bench:
        for _ in range(count):
            self.loop.step()
        return self


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_runs_to_its_length_and_ends_once(depth: int) -> None:
    bench = Bench(depth).add("a", num_prompt=4).steps(12)
    assert bench.desk.tokens("a") == [(1 + n) % 90 for n in range(4, 10)]
    assert bench.desk.ends("a") == ["length"]
    bench.scheduler.check()


def test_with_overlap_the_next_step_is_launched_before_the_last_one_settles() -> None:
    events = Bench(1).add("a").steps(4).executor.events
    assert events[:5] == ["launch 0", "launch 1", "settle 0", "launch 2", "settle 1"]


def test_without_overlap_each_step_settles_before_the_next_is_launched() -> None:
    events = Bench(0).add("a").steps(3).executor.events
    assert events[:6] == ["launch 0", "settle 0", "launch 1", "settle 1", "launch 2", "settle 2"]


class RecordedNvtx:
    """What NVTX was told, with the depth of what nests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self._nested: list[str] = []
        self._open: list[str] = []
        for name in ("range_push", "range_pop", "range_start", "range_end"):
            monkeypatch.setattr(torch.cuda.nvtx, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda _: None)

    def range_push(self, name: str) -> None:
        self._nested.append(name)

    def range_pop(self) -> None:
        self.told.append("/".join(self._nested))
        self._nested.pop()

    def range_start(self, name: str) -> int:
        self._open.append(name)
        return self._told_of(len(self._open) - 1, "begins")

    def range_end(self, handle: int) -> None:
        self._told_of(handle, "ends")

    def _told_of(self, handle: int, what: str) -> int:
        self.told.append(f"{self._open[handle]} {what}")
        return handle


def test_nvtx_ranges_mark_each_step_from_its_launch_to_its_end_and_each_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvtx = RecordedNvtx(monkeypatch)
    bench = Bench(1).add("a", max_new_tokens=2)
    bench.loop.ranges = step_ranges(True, torch.device("cuda"))
    bench.steps(3)
    first, second = "step 0: 0 decode, 1 prefill", "step 1: 1 decode, 0 prefill"
    assert nvtx.told[:10] == [
        "plan",
        f"{first} begins",
        "launch",
        "plan",
        f"{second} begins",
        "launch",
        "device",
        "settle",
        f"{first} ends",
        "plan",
    ]
    assert bench.desk.ends("a") == ["length"]
    assert sorted(entry for entry in nvtx.told if entry.startswith("step")) == sorted(
        f"{step} {what}" for step in (first, second) for what in ("begins", "ends")
    )


def test_on_a_cpu_there_is_nothing_to_mark_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(step_ranges(False, torch.device("cpu")), NoRanges) and not caplog.messages
    assert isinstance(step_ranges(True, torch.device("cpu")), NoRanges)
    assert ["--enable-nvtx: there is nothing to mark" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_end_of_text_drops_what_overlap_computed_behind_it(depth: int) -> None:
    bench = Bench(depth, lambda _request, n: EOS if n >= 6 else 5).add("a", num_prompt=4).steps(10)
    assert bench.desk.tokens("a") == [5, 5, EOS]
    assert bench.desk.ends("a") == ["stop"]
    assert bench.desk.published[-1].load.active_blocks == 0
    bench.scheduler.check()


def test_an_abort_gives_one_terminal_row_and_its_blocks_come_back_with_the_step_in_flight() -> None:
    bench = Bench(1).add("a", num_prompt=20, max_new_tokens=50).steps(3)
    bench.desk.commands.append(Abort(["a", "nobody", "a"]))
    bench.steps(3)
    assert bench.desk.ends("a") == ["abort"]
    assert bench.desk.published[-1].load == bench.loop.load()
    assert (bench.loop.load().num_running, bench.loop.load().active_blocks) == (0, 0)
    bench.scheduler.check()


def test_tokens_of_steps_that_ran_before_new_weights_keep_the_old_name() -> None:
    bench = Bench(1).add("a").steps(3)
    bench.loop.come_to_rest()
    bench.loop.name_weights("new")
    told = len(bench.desk.tokens("a"))
    assert told == 3 and {output.weight_version for output in bench.desk.published} == {""}
    bench.steps(8)
    later = [output.weight_version for output in bench.desk.published if output.rids][told:]
    assert later == ["new"] * 3 and bench.desk.ends("a") == ["length"]


def test_abort_all_ends_everything_and_the_loop_goes_on() -> None:
    bench = Bench(1).add("a").add("b").steps(2)
    bench.desk.commands.append(AbortAll("the gateway left"))
    bench.add("c").steps(12)
    assert (bench.desk.ends("a"), bench.desk.ends("b"), bench.desk.ends("c")) == (["abort"], ["abort"], ["length"])


def test_a_bad_request_is_rejected_and_its_neighbours_go_on() -> None:
    bench = Bench().add("a").add("bad", temperature=float("nan")).add("long", num_prompt=128).add("b").steps(12)
    rejections = [rejection for output in bench.desk.published for rejection in output.rejections]
    assert [(rejection.rid, rejection.field, rejection.code) for rejection in rejections] == [
        ("bad", "temperature", "invalid_value"),
        ("long", "prompt", "context_length_exceeded"),
    ]
    assert bench.desk.ends("a") == bench.desk.ends("b") == ["length"]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_without_a_token_ends_its_own_request_once_with_the_reason(depth: int) -> None:
    bench = Bench(depth)
    bench.executor.failures[1, 6] = NUMERICAL_ERROR
    bench.executor.failures[1, 7] = NUMERICAL_ERROR  # with overlap, one more step is in flight
    bench.add("a", num_prompt=4).add("b", num_prompt=4).steps(12)
    assert bench.desk.tokens("a") == [5, 6] and bench.desk.ends("a") == []
    (rejection,) = [entry for output in bench.desk.published for entry in output.rejections]
    assert (rejection.rid, rejection.status, rejection.code) == ("a", 500, "numerical_error")
    assert bench.desk.ends("b") == ["length"] and bench.loop.load().active_blocks == 0
    assert b'num_nan_aborted_requests_total{app_key="",model_name="m"} 1.0' in bench.metrics.metrics.render()
    bench.scheduler.check()


def test_an_id_in_use_is_rejected_and_free_again_afterwards() -> None:
    bench = Bench().add("a").steps(1).add("a").steps(12)
    rejections = [rejection for output in bench.desk.published for rejection in output.rejections]
    assert [rejection.code for rejection in rejections] == ["duplicate_request_id"]
    assert bench.add("a").steps(12).desk.ends("a") == ["length", "length"]


def test_of_those_who_wait_the_lowest_priority_runs_first() -> None:
    bench = Bench(0)
    for rid, priority in (("plain", 0), ("late", 3), ("urgent", -3)):
        prompt = np.arange(32, dtype=np.int32)  # fills a step
        params = SamplingParams(max_new_tokens=1)
        bench.desk.commands.append(Add(rid, prompt, params, priority, cache_salt=len(rid)))
    bench.steps(6)
    order = [rid for output in bench.desk.published for rid in output.rids]
    assert order == ["urgent", "plain", "late"]


class Spans:
    """A tracer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str | None, tuple[float, float], Attributes]] = []

    def begin(self, name: str, traceparent: str | None) -> Span:
        raise AssertionError("spans of an engine are over when they are told")

    def record(self, name: str, traceparent: str | None, times_ts: tuple[float, float], attributes: Attributes) -> None:
        self.told.append((traceparent, times_ts, attributes))

    def close(self) -> None:
        return None


def test_every_request_is_a_span_under_its_callers() -> None:
    bench, spans = Bench(), Spans()
    bench.loop.log.tracer = spans
    prompt = np.arange(5, dtype=np.int32)
    bench.desk.commands.append(Add("a", prompt, SamplingParams(max_new_tokens=3), 0, 0, "00-trace"))
    bench.add("b").steps(2)
    bench.desk.commands.append(Abort(["b"]))
    bench.steps(8)
    said = {str(attributes["tokenspeed.request_id"]): (parent, attributes) for parent, _, attributes in spans.told}
    assert [said["a"][0], said["b"][0]] == ["00-trace", None]
    assert said["a"][1]["gen_ai.usage.output_tokens"] == 3 and said["b"][1]["tokenspeed.finish_reason"] == "abort"
    times = [float(said["a"][1][f"tokenspeed.time_to_{what}_s"]) for what in ("scheduled", "prefilled", "first_token")]
    assert times == sorted(times) and all(begin <= end for _, (begin, end), _ in spans.told)


def test_the_loop_waits_only_when_there_is_nothing_to_do() -> None:
    desk = Bench(1).steps(1).add("a").steps(10).steps(2).desk
    assert desk.waits[0] > 0 and desk.waits[-1] > 0
    assert desk.waits[2] == 0


def test_the_load_is_told_when_the_last_request_has_ended() -> None:
    load = Bench(1).add("a").steps(12).desk.published[-1].load
    assert (load.num_running, load.num_waiting, load.active_blocks, load.total_blocks) == (0, 0, 0, 64)


def test_a_new_listener_is_told_the_load_at_once() -> None:
    bench = Bench(1)
    bench.desk.commands.append(Connected())
    assert [output.load.total_blocks for output in bench.steps(3).desk.published] == [64]


def test_a_stream_interval_gathers_tokens_but_not_the_first_or_the_last() -> None:
    bench = Bench(0).add("a", max_new_tokens=8, stream_interval=3).steps(10)
    pieces = [output.token_ids[0] for output in bench.desk.published if output.rids]
    assert [len(piece) for piece in pieces] == [1, 3, 3, 1]
    assert bench.desk.tokens("a") == [(1 + n) % 90 for n in range(4, 12)]


def test_new_slots_carry_seeds_and_prompts() -> None:
    bench = Bench(0).add("a", num_prompt=5).add("b", seed=7).steps(1)
    first, second = bench.executor.works[0].new_slots
    assert first.params.seed is not None and second.params.seed == 7
    assert first.prompt_ids.tolist() == [0, 1, 2, 3, 4] and len(first.output_ids) == 0


def test_logprobs_are_computed_only_while_somebody_wants_them() -> None:
    bench = Bench(0).add("a", max_new_tokens=2, logprobs=3).add("b", max_new_tokens=4).steps(4)
    assert [work.num_logprobs for work in bench.executor.works] == [3, 3, None, None]


def test_flush_answers_whether_it_could_and_unknown_calls_are_refused_by_name() -> None:
    replies: list[tuple[bool, str]] = []
    bench = Bench(1).add("a").steps(12)
    for method in ("flush_cache", "stop_profile", "dance"):
        bench.desk.commands.append(Control(method, [], lambda success, text: replies.append((success, text))))
    bench.steps(1)
    assert [success for success, _ in replies] == [True, False, False]
    assert "stop_profile: no profile is running" in replies[1][1] and "dance: no such call" in replies[2][1]


def test_an_error_of_a_step_leaves_the_loop() -> None:
    def broken(_request: int, _length: int) -> int:
        raise ZeroDivisionError("kernel")

    with pytest.raises(ZeroDivisionError):
        Bench(0, broken).add("a").loop.run(lambda: False)


def test_work_that_cannot_be_planned_is_a_fault_in_words() -> None:
    bench = Bench(0)

    class Stuck:
        def plan(self) -> None:
            return None

        def has_work(self) -> bool:
            return True

    bench.loop.scheduler = Stuck()  # type: ignore[assignment]
    with pytest.raises(EngineFault, match="no step can be planned"):
        bench.loop.step()


def until(bench: Bench, done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline_s
        bench.steps(1)


def test_a_request_waits_for_its_grammar_and_holds_nobody_up() -> None:
    bench = Bench().add("a", regex="x+").add("b").steps(12)
    assert bench.desk.ends("b") == ["length"] and bench.desk.ends("a") == []
    assert bench.desk.published[-1].load.num_waiting == 1
    assert bench.desk.waits[-1] <= 0.01, "while a grammar compiles, an idle loop looks again soon"
    bench.backend.go.set()
    until(bench, lambda: bool(bench.desk.ends("a")))
    assert bench.desk.ends("a") == ["length"]
    slots = [new for work in bench.executor.works for new in work.new_slots if new.grammar is not None]
    assert len(slots) == 1 and slots[0].params.regex == "x+"


def test_a_grammar_that_cannot_be_compiled_ends_its_request_with_400_and_the_reason() -> None:
    bench = Bench().add("a", regex="bad").add("b", regex="good")
    bench.backend.go.set()
    until(bench, lambda: bool(bench.desk.ends("b")))
    (rejection,) = [entry for output in bench.desk.published for entry in output.rejections]
    assert (rejection.rid, rejection.status, rejection.field) == ("a", 400, "regex")
    assert "no such thing" in rejection.message
    assert bench.loop.requests.of_rid("a") is None


def test_a_request_that_is_aborted_while_its_grammar_compiles_ends_once() -> None:
    bench = Bench().add("a", regex="x").steps(2)
    bench.desk.commands.append(Abort(["a"]))
    bench.steps(1)
    assert bench.desk.ends("a") == ["abort"]
    bench.backend.go.set()
    bench.add("b", regex="x")
    until(bench, lambda: bool(bench.desk.ends("b")))
    assert bench.desk.ends("a") == ["abort"]
