# SPDX-License-Identifier: MIT
"""`suffix` of text completions: the engine reads a gap, the client gets what fills it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tokenspeed.gateway.testing.fake_engine import END_TOKEN, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids, write_tokenizer

PATH = "/v1/completions"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PRE, SUF, MID, PAD = range(259, 263)
BOS = 1


def write_coder(folder: Path, bos: bool) -> None:
    """The tests' tokenizer with the tokens of Qwen's coders, not special there; `bos`: texts begin with one."""
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in FIM])
    if bos:
        backend.add_special_tokens(["<bos>"])
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<bos>"}))
    backend.save(str(file))
    assert backend.token_to_id(FIM[-1]) == PAD


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def coder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("coder")
    write_coder(folder, request.param)
    with RunningGateway([replying([*ids("x + y"), PAD])], ["--tokenizer-path", str(folder)]) as gateway:
        yield gateway


def seen(gateway: RunningGateway) -> list[int]:
    """What the engine was given last, without the token that begins a text."""
    prompt = list(gateway.engines[0].seen.requests[-1].input_ids)
    return prompt[1:] if prompt[0] == BOS else prompt


def test_the_engine_reads_both_sides_of_the_gap_and_the_text_is_what_fills_it(coder: RunningGateway) -> None:
    status, answer = coder.post(PATH, {"prompt": "def f(x, y):\n    return ", "suffix": "\n\nf(1, 2)", "max_tokens": 6})
    assert status == 200
    assert seen(coder) == [PRE, *ids("def f(x, y):\n    return "), SUF, *ids("\n\nf(1, 2)"), MID]
    assert answer["choices"][0]["text"] == "x + y"
    sampling = coder.engines[0].seen.requests[-1].sampling_params
    assert set(sampling.stop_token_ids or ()) >= {PRE, SUF, MID, PAD}


def test_the_token_that_begins_a_text_stays_in_front(coder: RunningGateway) -> None:
    coder.post(PATH, {"prompt": "a", "suffix": "b", "max_tokens": 6})
    first = coder.engines[0].seen.requests[-1].input_ids[0]
    coder.post(PATH, {"prompt": "a", "max_tokens": 6})
    assert first == (BOS if coder.engines[0].seen.requests[-1].input_ids[0] == BOS else PRE)


@pytest.mark.parametrize("prompt", [["a", "b"], [ids("a"), ids("b")]])
def test_every_prompt_has_its_gap_whatever_it_is_given_as(coder: RunningGateway, prompt: list[Any]) -> None:
    status, answer = coder.post(PATH, {"prompt": prompt, "suffix": "z", "max_tokens": 6, "n": 2})
    assert status == 200 and len(answer["choices"]) == 4
    given = [list(request.input_ids) for request in coder.engines[0].seen.requests[-4:]]
    assert [[token for token in ids if token != BOS] for ids in given] == [
        [PRE, *ids(letter), SUF, *ids("z"), MID] for letter in "aabb"
    ]


def test_a_stream_gives_the_same_and_an_echo_is_of_the_prompt_alone(coder: RunningGateway) -> None:
    events = coder.stream(PATH, {"prompt": "a", "suffix": "b", "max_tokens": 6, "echo": True})
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "ax + y"


def test_an_empty_suffix_asks_for_nothing_and_an_empty_prompt_is_a_gap_at_the_start(coder: RunningGateway) -> None:
    coder.post(PATH, {"prompt": "a", "suffix": "", "max_tokens": 6})
    assert seen(coder) == ids("a")
    assert coder.post(PATH, {"prompt": "", "suffix": "b", "max_tokens": 6})[0] == 200
    assert seen(coder) == [PRE, SUF, *ids("b"), MID]


def test_what_cannot_be_is_400_by_name(coder: RunningGateway) -> None:
    status, answer = coder.post(PATH, {"prompt": "a", "suffix": "b", "echo": True, "logprobs": 1})
    assert (status, answer["error"]["param"]) == (400, "suffix")
    status, answer = coder.post(PATH, {"prompt": "a", "suffix": "b" * 9000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    with RunningGateway([replying([END_TOKEN])]) as plain:
        status, answer = plain.post(PATH, {"prompt": "a", "suffix": "b"})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "suffix", "unsupported_parameter")


def write_llama(folder: Path) -> dict[str, int]:
    """A vocabulary that spells a space as U+2581 and puts one in front of every text, with CodeLlama's tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    pieces += ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return vocabulary


def test_a_suffix_begins_without_the_space_that_some_vocabularies_put_in_front(tmp_path: Path) -> None:
    of = write_llama(tmp_path)
    with RunningGateway([replying([of["b"], of["▁<EOT>"]])], ["--tokenizer-path", str(tmp_path)]) as gateway:
        status, answer = gateway.post(PATH, {"prompt": "a", "suffix": "b", "max_tokens": 5})
        assert (status, answer["choices"][0]["text"]) == (200, "b")
        given = list(gateway.engines[0].seen.requests[-1].input_ids)
        assert given == [of["▁<PRE>"], of["▁a"], of["▁<SUF>"], of["b"], of["▁<MID>"]]
