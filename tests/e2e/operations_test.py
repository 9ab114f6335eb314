# SPDX-License-Identifier: MIT
"""A whole server as its operators see it, over the control port."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import Server
from tokenspeed.gateway.testing.collector import Collector, attributes
from tokenspeed.observability.facts import differences, settled_scrape


def engine_metrics(server: Server) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.control_port}/metrics", timeout=10) as response:
        return str(response.read().decode())


def engine_metric(server: Server, name: str) -> float:
    families = text_string_to_metric_families(engine_metrics(server))
    return sum(s.value for family in families for s in family.samples if s.name == f"tokenspeed:{name}")


def test_the_engines_metrics_are_on_the_control_port(server: Server) -> None:
    before = engine_metric(server, "generation_tokens_total")
    body = {"prompt": "Count: one two", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200
    assert engine_metric(server, "generation_tokens_total") == before + 5
    assert engine_metric(server, "num_requests_running") == 0


def test_the_engines_metrics_are_those_that_dashboards_know(server: Server) -> None:
    before = settled_scrape(lambda: engine_metrics(server))
    body = {"prompt": "Ten little words of a prompt that comes twice " * 8, "max_tokens": 5, "ignore_eos": True}
    for _ in range(2):
        assert server.post("/v1/completions", body)[0] == 200
    assert differences(before, settled_scrape(lambda: engine_metrics(server))) == []


def test_an_answer_that_ends_at_a_stop_string_is_a_success_to_the_engine(server: Server) -> None:
    before = engine_metric(server, "num_requests_total"), engine_metric(server, "request_success_total")
    body = {"prompt": "Count: one two three four", "max_tokens": 200, "temperature": 0, "stop": ["e", "i", "o", " "]}
    assert server.post("/v1/completions", body)[1]["choices"][0]["finish_reason"] == "stop"
    settled_scrape(lambda: engine_metrics(server))
    after = engine_metric(server, "num_requests_total"), engine_metric(server, "request_success_total")
    assert after == (before[0] + 1, before[1] + 1)


def control(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.control_port}{path}", data, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_pause_at_the_control_port_holds_a_request_back_until_the_engine_goes_on(server: Server) -> None:
    answers: list[int] = []
    body = {"prompt": "Count: one two", "max_tokens": 3, "temperature": 0}
    assert control(server, "/pause_generation", {"mode": "keep"})[0] == 200
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)[0]))
    thread.start()
    time.sleep(0.5)
    assert answers == []
    assert control(server, "/v1/loads")[1]["loads"][0]["num_reqs"] == 1
    assert control(server, "/continue_generation", {})[0] == 200
    thread.join(30)
    assert answers == [200]


def test_weights_are_loaded_again_under_another_name_while_the_server_runs(server: Server) -> None:
    status, info = control(server, "/model_info")
    assert (status, info["weight_version"]) == (200, "default")
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    before = server.post("/v1/completions", body)[1]["choices"][0]["text"]
    asked = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 2}}
    assert server.post("/generate", asked)[1]["meta_info"]["weight_version"] == "default"
    update = {"model_path": info["model_path"], "weight_version": "again"}
    assert control(server, "/update_weights_from_disk", update)[0] == 200
    assert control(server, "/get_weight_version")[1] == {"weight_version": "again"}
    assert server.post("/generate", asked)[1]["meta_info"]["weight_version"] == "again"
    after = server.post("/v1/completions", body)[1]
    assert after["choices"][0]["text"] == before
    assert control(server, "/update_weight_version", {"new_version": "default"})[0] == 200


def test_the_key_of_the_controls_is_told_to_nobody(server: Server) -> None:
    assert "rl_control_api_key" not in control(server, "/get_server_info")[1]["server_args"]


def test_spans_of_gateway_and_engine_share_the_callers_trace(server: Server, collector: Collector) -> None:
    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = json.dumps({"prompt": "Count: one two", "max_tokens": 5, "temperature": 0, "ignore_eos": True}).encode()
    headers = {"traceparent": f"00-{trace}-{caller}-01", "content-type": "application/json"}
    asked = urllib.request.Request(server.base_url + "/v1/completions", body, headers)
    assert urllib.request.urlopen(asked, timeout=60).status == 200

    def ours() -> dict[str, Any]:
        return {service: span for service, span in list(collector.spans) if span.trace_id.hex() == trace}

    deadline = time.monotonic() + 20
    while len(ours()) < 2:
        assert time.monotonic() < deadline, f"only these came: {list(ours())}"
        time.sleep(0.05)
    gateway, engine = ours()["tokenspeed-gateway"], ours()["tokenspeed-engine"]
    assert (gateway.parent_span_id.hex(), engine.parent_span_id) == (caller, gateway.span_id)
    assert gateway.start_time_unix_nano <= engine.start_time_unix_nano <= engine.end_time_unix_nano
    assert attributes(engine)["gen_ai.usage.output_tokens"] == 5 == attributes(gateway)["gen_ai.usage.output_tokens"]


def test_the_control_port_hands_requests_for_text_on_to_the_gateway_and_streams_as_it_does(server: Server) -> None:
    body = {"prompt": "Count: one two", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    expected = server.post("/v1/completions", body)[1]["choices"][0]["text"]
    assert control(server, "/v1/completions", body)[1]["choices"][0]["text"] == expected
    asked = {"text": "Count: one two", "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}}
    assert control(server, "/generate", asked)[1]["text"] == expected
    url = f"http://127.0.0.1:{server.control_port}/v1/completions"
    with urllib.request.urlopen(url, json.dumps(body | {"stream": True}).encode(), timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in stream.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected
    assert control(server, "/v1/models")[1]["data"] and control(server, "/health_check")[0] == 200
    status, error = control(server, "/v1/completions", body | {"max_tokens": "five"})
    assert status == 400 and error["error"]["param"] == "max_tokens"
