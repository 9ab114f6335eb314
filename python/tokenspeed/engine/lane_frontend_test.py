# SPDX-License-Identifier: MIT
"""Lane messages to commands and outputs to batches, in the forms that the wire has them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenspeed.config.sampling import RequestError
from tokenspeed.engine.lane_frontend import to_add, to_batch
from tokenspeed.engine.messages import LoadNumbers, PromptLogprobs, Rejection, StepOutput, TokenLogprobs
from tokenspeed.rpc.lane import wire
from tokenspeed.rpc.lane.testing import SAMPLING as PLAIN

SAMPLING = wire.MoreSamplingParamsWire(
    **msgspec.structs.asdict(
        msgspec.structs.replace(
            PLAIN,
            stop_token_ids=[7],
            temperature=0.8,
            top_p=0.9,
            min_p=0.1,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.1,
            min_new_tokens=2,
            ignore_eos=True,
            logit_bias={"5": 1.5},
            seed=42,
        )
    )
)


def request(sampling: dict[str, Any] | None = None, **changes: Any) -> wire.TokenizedGenerateReqInput:
    fields: dict[str, Any] = {
        "rid": "r",
        "http_worker_ipc": None,
        "input_text": None,
        "input_ids": [1, 2, 3],
        "sampling_params": msgspec.structs.replace(SAMPLING, **(sampling or {})),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
    }
    return wire.TokenizedGenerateReqInput(**(fields | changes))


def test_every_sampling_field_arrives() -> None:
    add = to_add(request())
    params = add.params
    assert add.rid == "r" and add.token_ids.tolist() == [1, 2, 3] and add.token_ids.dtype.name == "int32"
    assert (params.max_new_tokens, params.min_new_tokens, params.stop_token_ids) == (16, 2, (7,))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.8, 0.9, -1, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.ignore_eos, params.seed, params.logit_bias, params.logprobs) == (True, 42, {5: 1.5}, None)
    params.validate(100, 100)


def test_priority_arrives_and_a_salt_is_a_number_that_is_the_same_in_every_engine() -> None:
    plain, salted = to_add(request()), to_add(request(priority=-5, cache_salt="a"))
    assert (plain.priority, plain.cache_salt) == (0, 0)
    assert to_add(request(traceparent="00-a")).traceparent == "00-a" and plain.traceparent is None
    assert (salted.priority, salted.cache_salt) == (-5, 0x32A5E044B286EF72)
    assert to_add(request(cache_salt="b")).cache_salt not in (0, salted.cache_salt)
    with pytest.raises(RequestError, match="priority must be"):
        to_add(request(priority=2**31))


@pytest.mark.parametrize("greedy", [{"temperature": 1.0, "top_k": 1}, {"temperature": 1e-7}, {"temperature": 0.0}])
def test_every_spelling_of_greedy_is_greedy(greedy: dict[str, Any]) -> None:
    assert to_add(request(greedy)).params.temperature == 0


def test_logprobs_are_asked_for_beside_the_sampling_fields() -> None:
    assert to_add(request(return_logprob=True)).params.logprobs == 0
    assert to_add(request(return_logprob=True, top_logprobs_num=5)).params.logprobs == 5
    assert to_add(request(return_logprob=True, token_ids_logprob=[5, 6])).params.token_ids_logprob == (5, 6)


ABSENT = [
    ({"sampling": {"thinking_budget": 5}}, "thinking_budget"),
    ({"sampling": {"stop_strs": ["x"]}}, "stop_strs"),
    ({"sampling": {"logit_bias": {"x": 1.0}}}, "logit_bias"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"bootstrap_room": 5}, "bootstrap_room"),
    ({"multimodal_inputs": [1]}, "multimodal_inputs"),
    ({"validation_error": "too odd"}, "request"),
    ({"input_ids": [2**31]}, "prompt"),
]


@pytest.mark.parametrize(("changes", "field"), ABSENT, ids=lambda value: str(value)[:40])
def test_what_this_engine_lacks_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_add(request(**changes))
    assert caught.value.field == field


LOAD = LoadNumbers(1, 2, 3, 4)


def test_rows_rejections_and_load_share_one_batch_of_equal_columns() -> None:
    output = StepOutput(
        rids=["a", "b"],
        token_ids=[[5], [6]],
        finish=["", "stop"],
        prompt_tokens=[3, 4],
        completion_tokens=[1, 2],
        cached_tokens=[0, 2],
        matched_tokens=[-1, 6],
        logprobs=[None, TokenLogprobs([-0.5], [[-0.5, -1.5]], [[6, 9]])],
        prompt_logprobs=[
            PromptLogprobs(0, [1, 2, 3], [None, -0.25, -2.0], [[], [-0.25], [-1.0]], [[], [2], [7]]),
            None,
        ],
        rejections=[Rejection("c", 400, "top_p", "invalid_value", "top_p is odd")],
        load=LOAD,
        weight_version="step-3",
    )
    batch = wire.decode_output(wire.encode(to_batch(output, 7)))
    assert isinstance(batch, wire.BatchTokenIDOutSlim)
    assert batch.rids == ["a", "b", "c"] and batch.finished_reasons == ["", "stop", "abort"]
    assert batch.output_ids == [[5], [6], []] and batch.matched_stops == [None, 6, None]
    assert batch.input_token_logprobs_val == [[None, -0.25, -2.0], [], []]
    assert batch.input_token_logprobs_idx == [[1, 2, 3], [], []]
    assert batch.input_top_logprobs_idx == [[[], [2], [7]], [], []]
    assert batch.output_token_logprobs_val == [[], [-0.5], []] and batch.output_token_logprobs_idx == [[], [6], []]
    assert batch.output_top_logprobs_val == [[], [[-0.5, -1.5]], []]
    assert batch.output_top_logprobs_idx == [[], [[6, 9]], []]
    assert (
        batch.finished_status_codes == [None, None, 400] and batch.finished_messages[2] == "invalid_value: top_p is odd"
    )
    assert batch.weight_versions == ["step-3"] * 3
    load = (batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages, batch.engine_index)
    assert load == (1, 2, 3, 4, 7)


def test_a_batch_without_rows_is_a_sign_of_life() -> None:
    output = StepOutput([], [], [], [], [], [], [], None, None, [], LOAD, "step-3")
    batch = wire.decode_output(wire.encode(to_batch(output, 0)))
    assert isinstance(batch, wire.BatchTokenIDOutSlim) and batch.rids == [] and batch.kv_total_pages == 4
