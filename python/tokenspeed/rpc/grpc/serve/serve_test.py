# SPDX-License-Identifier: MIT
"""The gRPC services over a socket: what comes back is what the engine says in process, and faults have names."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.processes import python_environment
from tokenspeed.engine.offline import Engine
from tokenspeed.observability.facts import differences, settled_scrape
from tokenspeed.rpc.grpc.limits import DEFAULT_MAX_MESSAGE_BYTES, LimitError, max_message_bytes
from tokenspeed.rpc.grpc.serve.conftest import RunningServer, Served
from tokenspeed_protos import common_pb2, tokenspeed_encoder_pb2, tokenspeed_encoder_pb2_grpc
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb

PROMPT = "The capital of France is"
_numbers = itertools.count()


def request(engine: Engine, prompt: str | list[int] = PROMPT, **fields: Any) -> pb.GenerateRequest:
    """Greedy unless told otherwise; `params` are sampling parameters."""
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True, "skip_special_tokens": True}
    params |= fields.pop("params", {})
    token_ids = engine.encode(prompt).tolist() if isinstance(prompt, str) else prompt
    fields = {"request_id": f"r{next(_numbers)}", "stream": True} | fields
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=token_ids), sampling_params=pb.SamplingParams(**params), **fields
    )


def answers(served: Served, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return list(served.stub.Generate(asked, timeout=60))


def completes(responses: list[pb.GenerateResponse]) -> dict[int, pb.GenerateComplete]:
    return {r.complete.index: r.complete for r in responses if r.HasField("complete")}


def streamed(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == index]
    return [token for chunk in chunks for token in chunk.token_ids]


def wait_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while engine.load().active_blocks or engine.load().num_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_metrics_are_those_that_dashboards_know(served: Served) -> None:
    url = f"http://127.0.0.1:{served.engine.ports.metrics_port}/metrics"

    def scrape() -> str:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())

    before = settled_scrape(scrape)
    for _ in range(2):
        answers(served, request(served.engine, "One two three four five six seven eight nine ten " * 3))
    assert differences(before, settled_scrape(scrape)) == []


def test_a_stream_has_the_tokens_that_the_engine_gives(served: Served) -> None:
    expected = served.engine.generate(PROMPT, {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True})[0]
    responses = answers(served, request(served.engine))
    assert streamed(responses) == expected.token_ids
    complete = completes(responses)[0]
    assert responses[-1].HasField("complete")
    assert (complete.finish_reason, complete.completion_tokens) == ("length", 12)
    assert complete.prompt_tokens == expected.prompt_tokens
    assert complete.weight_version == "default"
    totals = [r.chunk.completion_tokens for r in responses if r.HasField("chunk")]
    assert totals == sorted(totals) and totals[-1] == 12


def test_an_answer_that_is_not_streamed_comes_whole_with_its_logprobs(served: Served) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True, "logprobs": 2}
    expected = served.engine.generate(PROMPT, params)[0]
    asked = request(served.engine, stream=False, return_logprob=True, top_logprobs_num=2, params={"max_new_tokens": 5})
    (response,) = answers(served, asked)
    scores = response.complete.output_logprobs
    assert list(response.complete.output_ids) == list(scores.token_ids) == expected.token_ids
    assert expected.logprobs is not None
    for entry, value, top in zip(expected.logprobs, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert value == pytest.approx(entry.logprob, abs=1e-4)
        assert list(top.token_ids) == [token for token, _ in entry.top]


def test_logprobs_of_a_prompt_come_once_and_are_those_of_the_engine(served: Served) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 2, "prompt_logprobs": 1}
    expected = served.engine.generate(PROMPT, params)[0].prompt_logprobs
    asked = request(served.engine, return_logprob=True, logprob_start_len=0, top_logprobs_num=1)
    scored = [r.chunk.prompt_logprobs for r in answers(served, asked) if r.chunk.HasField("prompt_logprobs")]
    assert len(scored) == 1 and expected is not None
    assert math.isnan(scored[0].token_logprobs[0])
    values = [entry.logprob for entry in expected[1:] if entry is not None]
    assert list(scored[0].token_logprobs)[1:] == pytest.approx(values, abs=1e-4)
    (whole,) = answers(served, request(served.engine, stream=False, return_logprob=True, logprob_start_len=2))
    assert whole.complete.prompt_logprobs.start == 2
    assert list(whole.complete.prompt_logprobs.token_logprobs) == pytest.approx(values[1:], abs=1e-4)


@pytest.mark.parametrize("streams", [True, False])
def test_logprobs_of_named_tokens_stand_behind_the_likeliest(served: Served, streams: bool) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 3, "logprobs": 1, "prompt_logprobs": 1, "token_ids_logprob": [9, 4]}
    expected = served.engine.generate(PROMPT, params)[0]
    fields: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "token_ids_logprob": [9, 4],
    }
    responses = answers(served, request(served.engine, stream=streams, params={"max_new_tokens": 3}, **fields))
    parts = [getattr(r, str(r.WhichOneof("response"))) for r in responses]
    outputs = [best for part in parts for best in part.output_logprobs.top_logprobs]
    prompts = [best for part in parts for best in part.prompt_logprobs.top_logprobs]
    assert expected.logprobs is not None and expected.prompt_logprobs is not None
    for told, scores in ((outputs, expected.logprobs), (prompts[1:], expected.prompt_logprobs[1:])):
        for best, entry in zip(told, scores, strict=True):
            assert entry is not None
            assert list(best.token_ids) == [token for token, _ in (*entry.top, *entry.chosen)]
            assert list(best.values) == pytest.approx([value for _, value in (*entry.top, *entry.chosen)], abs=1e-4)


def test_choices_differ_and_the_first_is_that_of_a_single_request(served: Served) -> None:
    params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 8}
    responses = answers(served, request(served.engine, params=params | {"n": 3}))
    texts = [tuple(streamed(responses, index)) for index in range(3)]
    assert len(set(texts)) == 3
    assert sorted(completes(responses)) == [0, 1, 2]
    assert texts[0] == tuple(streamed(answers(served, request(served.engine, params=params))))


def test_numbers_travel_as_they_were_meant(served: Served) -> None:
    """0.7 is no float32; the engine's own 0.7 draws the same tokens."""
    params: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    own = served.engine.generate(PROMPT, params | {"seed": 3, "max_new_tokens": 12, "ignore_eos": True})[0]
    assert streamed(answers(served, request(served.engine, params=params | {"sampling_seed": 3}))) == own.token_ids


def test_a_stop_string_ends_the_choice_and_is_named(served: Served) -> None:
    responses = answers(served, request(served.engine, params={"stop": ["Paris"], "max_new_tokens": 200}))
    complete = completes(responses)[0]
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "Paris")
    assert served.engine.tokenizer is not None
    text = served.engine.tokenizer.decode(streamed(responses), skip_special_tokens=True)
    assert text.endswith("Paris")
    wait_idle(served.engine)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_token_stays_only_where_it_is_asked_for(served: Served, keeps: bool) -> None:
    tokens = streamed(answers(served, request(served.engine)))
    params = {"stop_token_ids": [tokens[2]], "no_stop_trim": keeps}
    responses = answers(served, request(served.engine, params=params, return_logprob=True))
    assert streamed(responses) == tokens[: 3 if keeps else 2]
    assert completes(responses)[0].matched_token_id == tokens[2]
    assert sum(len(r.chunk.output_logprobs.token_logprobs) for r in responses) == (3 if keeps else 2)


def test_a_stop_token_that_comes_first_still_opens_the_choice(served: Served) -> None:
    first = streamed(answers(served, request(served.engine)))[0]
    responses = answers(served, request(served.engine, params={"stop_token_ids": [first]}))
    assert [r.WhichOneof("response") for r in responses] == ["chunk", "complete"]
    assert streamed(responses) == []


def test_a_schema_constrains_the_answer(served: Served) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]})
    params = {"json_schema": schema, "max_new_tokens": 40, "ignore_eos": False}
    (response,) = answers(served, request(served.engine, stream=False, params=params))
    assert served.engine.tokenizer is not None
    text = served.engine.tokenizer.decode(response.complete.output_ids, skip_special_tokens=True)
    assert json.loads(text) == {"a": 1}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("temperature", {"params": {"temperature": math.nan}}),
        ("top_p", {"params": {"top_p": 7.0}}),
        ("logit_bias", {"params": {"logit_bias": {"x": 1.0}}}),
        ("logit_bias", {"params": {"logit_bias": {"99999999": 1.0}}}),
        ("max_new_tokens", {"params": {"max_new_tokens": 0}}),
        ("n", {"params": {"n": 1000}}),
        ("input_ids", {"prompt": []}),
        ("input_ids", {"prompt": [99999999]}),
        ("input_ids", {"prompt": [5] * 1024}),
        ("request_id", {"request_id": ""}),
        ("regex", {"params": {"regex": "("}}),
        ("token_ids_logprob", {"token_ids_logprob": [1]}),
        ("token_ids_logprob", {"token_ids_logprob": [2**31], "return_logprob": True}),
        ("data_parallel_rank", {"data_parallel_rank": 3}),
        ("kv_bootstrap_info", {"kv_bootstrap_info": pb.KvBootstrapInfo(bootstrap_room=1)}),
        ("mm_inputs", {"mm_inputs": pb.MultimodalInputs(items=[pb.MultimodalItem()])}),
        ("top_logprobs_num", {"return_logprob": True, "top_logprobs_num": 5000}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_and_the_next_call_works(
    served: Served, field: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        answers(served, request(served.engine, **changes))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    named = dict(refused.value.trailing_metadata())["tokenspeed-error-field"]
    assert named == field, refused.value.details()
    assert completes(answers(served, request(served.engine, params={"max_new_tokens": 1})))


def test_leaving_a_call_frees_its_blocks(served: Served) -> None:
    call = served.stub.Generate(request(served.engine, params={"max_new_tokens": 900, "n": 2}))
    next(call)
    assert served.engine.load().active_blocks
    call.cancel()
    wait_idle(served.engine)


def test_an_abort_ends_every_choice_once(served: Served) -> None:
    asked = request(served.engine, params={"max_new_tokens": 900, "n": 2}, request_id="to-abort")
    call = served.stub.Generate(asked)
    next(call)
    assert not served.stub.Abort(pb.AbortRequest(request_id="to")).success
    assert served.stub.Abort(pb.AbortRequest(request_id="to-abort")).success
    ends = [r.complete for r in call if r.HasField("complete")]
    assert [(end.index, end.finish_reason) for end in sorted(ends, key=lambda end: end.index)] == [
        (0, "abort"),
        (1, "abort"),
    ]
    assert not served.stub.Abort(pb.AbortRequest(request_id="to-abort")).success
    wait_idle(served.engine)


def test_an_id_that_runs_is_refused_and_its_first_owner_goes_on(served: Served) -> None:
    first = served.stub.Generate(request(served.engine, request_id="same", params={"max_new_tokens": 60}))
    next(first)
    with pytest.raises(grpc.RpcError) as refused:
        answers(served, request(served.engine, request_id="same"))
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert next(r for r in first if r.HasField("complete")).complete.completion_tokens == 60


def test_it_tells_the_model_the_flags_and_the_load(served: Served) -> None:
    model = served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.max_context_length, model.vocab_size, model.model_type) == (1024, 49152, "llama")
    assert list(model.eos_token_ids) == list(served.engine.model_config.eos_token_ids)
    server = served.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.server_args["block_size"] == 16 and server.server_args["max_num_seqs"] == 8
    assert server.max_total_num_tokens == server.scheduler_info["max_total_num_tokens"] == 4096
    call = served.stub.Generate(request(served.engine, params={"max_new_tokens": 500}))
    next(call)
    load = served.stub.GetLoads(pb.GetLoadsRequest()).loads[0]
    assert load.num_running_reqs == 1 and load.num_used_tokens > 0 and 0 < load.token_usage < 1
    assert not served.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1)).loads
    call.cancel()
    wait_idle(served.engine)


def test_the_tokenizer_is_streamed_with_its_digest(served: Served) -> None:
    chunks = list(served.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    archive = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 1 and chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(archive)).namelist()


def test_kv_events_tell_what_is_cached_to_early_and_to_late_subscribers(served: Served) -> None:
    served.engine.operations.flush_cache()
    live = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(load_records_before_first_batch=True))
    prompt = [(7 * i) % 300 + 3 for i in range(40)]
    answers(served, request(served.engine, prompt, params={"max_new_tokens": 1}))

    def stored(batches: Any) -> list[list[int]]:
        """Token ids of the blocks stored since the last clearing, until both of the prompt's are seen."""
        blocks: list[list[int]] = []
        for batch in batches:
            for event in batch.events:
                kind = event.WhichOneof("data")
                if kind == "cleared":
                    blocks = []
                elif kind == "stored":
                    blocks += [list(block.token_ids) for block in event.stored.blocks]
            if prompt[16:32] in blocks:
                batches.cancel()
                return blocks
        raise AssertionError("the stream ended")

    assert stored(live)[-2:] == [prompt[:16], prompt[16:32]]
    late = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    assert stored(late)[-2:] == [prompt[:16], prompt[16:32]]
    lost = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=10**9))
    with pytest.raises(grpc.RpcError) as refused:
        next(lost)
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE


def test_an_idle_stream_of_kv_events_tells_the_load(served: Served) -> None:
    wait_idle(served.engine)
    asked = common_pb2.SubscribeKvEventsRequest(load_records_before_first_batch=True)
    stream = served.stub.SubscribeKvEvents(asked)
    record = next(batch for batch in stream if batch.load.load_only)
    assert record.load.max_running_requests == 8 and record.load.max_total_num_tokens == 4096
    stream.cancel()


def test_a_flush_empties_the_cache_and_waits_for_nobody(served: Served) -> None:
    answers(served, request(served.engine, [9] * 64, params={"max_new_tokens": 1}))
    again = request(served.engine, [9] * 64, params={"max_new_tokens": 1})
    assert completes(answers(served, again))[0].cached_tokens > 0
    assert served.stub.FlushCache(common_pb2.FlushCacheRequest()).success
    fresh = request(served.engine, [9] * 64, params={"max_new_tokens": 1})
    assert completes(answers(served, fresh))[0].cached_tokens == 0
    call = served.stub.Generate(request(served.engine, params={"max_new_tokens": 900}))
    next(call)
    assert not served.stub.FlushCache(common_pb2.FlushCacheRequest()).success
    call.cancel()
    wait_idle(served.engine)


def test_health_reflection_and_the_absent_encoder(served: Served) -> None:
    assert served.stub.HealthCheck(pb.HealthCheckRequest(), timeout=30).healthy
    health = health_pb2_grpc.HealthStub(served.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    services = next(reflection.ServerReflectionInfo(iter([asked]))).list_services_response.service
    names = {service.name for service in services}
    assert names >= {"tokenspeed.grpc.scheduler.TokenSpeedScheduler", "tokenspeed.grpc.encoder.TokenSpeedEncoder"}
    encoder = tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(served.channel)
    with pytest.raises(grpc.RpcError) as refused:
        encoder.Encode(tokenspeed_encoder_pb2.EncodeRequest())
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_full_engine_is_healthy_while_it_moves(served: Served) -> None:
    calls = [served.stub.Generate(request(served.engine, params={"max_new_tokens": 900})) for _ in range(9)]
    next(calls[0])
    assert served.stub.HealthCheck(pb.HealthCheckRequest(), timeout=10).healthy
    for call in calls:
        call.cancel()
    wait_idle(served.engine)


def test_a_paused_engine_is_healthy_and_says_so(served: Served) -> None:
    served.engine.operations.pause("keep", 10)
    try:
        assert served.stub.HealthCheck(pb.HealthCheckRequest(), timeout=10).healthy
        assert served.stub.GetServerInfo(pb.GetServerInfoRequest()).is_paused
    finally:
        served.engine.operations.resume()


def test_a_draining_server_ends_what_runs_and_takes_nothing_new(engine: Engine) -> None:
    running = RunningServer(engine)
    with grpc.insecure_channel(f"127.0.0.1:{running.server.port}") as channel:
        draining = Served(engine, running.server, channel, running.loop)
        call = draining.stub.Generate(request(engine, params={"max_new_tokens": 100}))
        next(call)
        stopping = threading.Thread(target=running.stop, args=(30.0,))
        stopping.start()
        while not running.server.servicer.draining:
            time.sleep(0.005)
        with pytest.raises(grpc.RpcError) as refused:
            answers(draining, request(engine))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert next(r for r in call if r.HasField("complete")).complete.completion_tokens == 100
        stopping.join()


def test_the_limit_of_messages_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_message_bytes() == DEFAULT_MAX_MESSAGE_BYTES
    monkeypatch.setenv("TOKENSPEED_GRPC_MAX_MESSAGE_BYTES", "4096")
    assert max_message_bytes() == 4096
    monkeypatch.setenv("TOKENSPEED_GRPC_MAX_MESSAGE_BYTES", "many")
    with pytest.raises(LimitError, match="TOKENSPEED_GRPC_MAX_MESSAGE_BYTES"):
        max_message_bytes()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--no-such"], "--no-such"),
        (["--skip-tokenizer-init"], "--skip-tokenizer"),
        (["--kv-cache-gib", "0.0001"], "--kv-cache-gib"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(words: list[str], named: str) -> None:
    env = python_environment()
    command = [sys.executable, "-m", "tokenspeed.rpc.grpc", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and len(lines) == 1 and named in lines[0], done.stderr
    assert "Traceback" not in done.stderr
