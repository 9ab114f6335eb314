# SPDX-License-Identifier: MIT
"""The engine as servicers of other projects drive it: the same tokens as `generate`, in dicts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed.config.sampling import RequestError
from tokenspeed.config.server_args import ServerArgs
from tokenspeed.engine.media import Modality, MultimodalDataItem, MultimodalInputs, hash_feature
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.served_llm import GenerateReqInput, ServedLLM
from tokenspeed.engine.served_start import ServedEngine

StartEngine = Callable[..., Engine]
PROMPT = [5, 6, 7, 8]
PARAMS: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture
def llm(start_engine: StartEngine) -> ServedLLM:
    return ServedLLM(start_engine(), ServerArgs())


def request(rid: str | list[str], **fields: Any) -> GenerateReqInput:
    made = GenerateReqInput(input_ids=PROMPT, sampling_params=PARAMS | fields.pop("params", {}), **fields)
    made.rid = rid
    return made


def collect(llm: ServedLLM, made: GenerateReqInput) -> list[Any]:
    async def run() -> list[Any]:
        return [output async for output in llm.generate_request(made)]

    return asyncio.run(run())


def test_a_stream_has_new_tokens_and_ends_with_a_reason(llm: ServedLLM) -> None:
    outputs = collect(llm, request("r", stream=True, return_logprob=True, top_logprobs_num=2))
    own = llm.engine.generate([PROMPT], PARAMS | {"logprobs": 2})[0]
    assert [token for output in outputs for token in output["output_ids"]] == own.token_ids
    reasons = [output["meta_info"]["finish_reason"] for output in outputs]
    assert reasons == [None] * (len(outputs) - 1) + [{"type": "length", "length": 6}]
    meta = outputs[-1]["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (4, 6, "default")
    assert [score[0] for score in meta["output_token_logprobs"]] == [entry.logprob for entry in own.logprobs or []]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert llm.rid_to_state == {}


def test_choices_come_as_one_list_or_as_a_stream_each(llm: ServedLLM) -> None:
    own = llm.engine.generate([PROMPT], PARAMS | {"n": 2})[0]
    (whole,) = collect(llm, request(["a", "b"], params={"n": 2}))
    assert [output["output_ids"] for output in whole] == [choice.token_ids for choice in own.choices]
    streamed = collect(llm, request("c", params={"n": 2}, stream=True))
    for index, choice in enumerate(own.choices):
        tokens = [token for output in streamed if output["index"] == index for token in output["output_ids"]]
        assert tokens == choice.token_ids


def test_an_abort_by_name_ends_the_stream_with_its_reason(llm: ServedLLM) -> None:
    async def run() -> dict[str, Any]:
        stream = llm.generate_request(request("gone", params={"max_new_tokens": 900}, stream=True))
        await anext(stream)
        assert not llm.rid_to_state["gone"].finished
        llm.abort_request("gone")
        return [output async for output in stream][-1]["meta_info"]["finish_reason"]

    reason = asyncio.run(run())
    assert (reason["type"], reason["err_type"]) == ("abort", 522)


def test_a_flush_says_whether_it_could(llm: ServedLLM) -> None:
    async def run() -> None:
        stream = llm.generate_request(request("r", params={"max_new_tokens": 900}, stream=True))
        await anext(stream)
        assert not (await llm.flush_cache()).success
        assert (await llm.get_load())[0].num_reqs == 1
        await stream.aclose()
        while not (await llm.flush_cache()).success:
            await asyncio.sleep(0.01)
        assert (await llm.get_load())[0].num_pages == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("mm_inputs", {"precomputed_multimodal_inputs": MultimodalInputs()}),
        ("bootstrap_room", {"bootstrap_room": 7}),
        ("token_ids_logprob", {"token_ids_logprob": [1]}),
        ("data_parallel_rank", {"data_parallel_rank": 3}),
        ("logit_bias", {"params": {"logit_bias": {"x": 1.0}}}),
        ("no_such", {"params": {"no_such": 1}}),
    ],
)
def test_what_cannot_be_honoured_is_a_value_error_that_names_it(
    llm: ServedLLM, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as refused:
        collect(llm, request("r", **fields))
    assert refused.value.field == field
    assert isinstance(refused.value, ValueError)


def test_logprobs_of_named_tokens_stand_in_the_meta_info(llm: ServedLLM) -> None:
    named = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "token_ids_logprob": [9, 4]}
    meta = collect(llm, request("named", **named))[-1]["meta_info"]
    for way in ("output", "input"):
        rows = meta[f"{way}_token_ids_logprobs"][way == "input" :]
        assert rows and all([token for _, token, _ in row] == [9, 4] for row in rows)
    assert all(len(row) == 1 for row in meta["output_top_logprobs"])
    assert "output_token_ids_logprobs" not in collect(llm, request("plain", return_logprob=True))[-1]["meta_info"]


def test_an_id_that_runs_is_refused(llm: ServedLLM) -> None:
    async def run() -> None:
        stream = llm.generate_request(request("same", params={"max_new_tokens": 900}, stream=True))
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            await anext(llm.generate_request(request("same")))
        assert (await anext(stream))["output_ids"]
        await stream.aclose()

    asyncio.run(run())


def test_an_engine_is_started_from_server_args_and_fills_in_its_limits(tiny_model: str) -> None:
    args = ServerArgs(model=tiny_model, load_format="dummy", device="cpu", skip_tokenizer_init=True, block_size=16)
    args.max_total_tokens = 1024
    engine = ServedEngine(server_args=args)
    try:
        assert engine.scheduler_info["max_total_num_tokens"] == args.max_total_num_tokens == 1024
        assert args.max_model_len == engine.tokenizer_manager.context_len == 1024
        assert engine.tokenizer_manager.model_config.hf_config.model_type == "llama"
    finally:
        engine.shutdown()


def test_items_of_media_have_the_pad_values_of_the_protocol() -> None:
    item = MultimodalDataItem(Modality.VIDEO, hash=715_494_549 + 5)
    item.set_pad_value()
    assert item.pad_value == 1_000_000 + 715_494_549 + 5
    assert hash_feature([1.0, 2.0]) == hash_feature([1.0, 2.0]) != hash_feature([2.0, 1.0])
