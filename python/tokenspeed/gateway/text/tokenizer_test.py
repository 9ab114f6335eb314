# SPDX-License-Identifier: MIT
"""The tokenizer of a GGUF file gives the ids that transformers gives, and its decoder the text that went in."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.config.model_source import resolve_model
from tokenspeed.gateway.text.detokenizer import Detokenizer
from tokenspeed.gateway.text.gguf_tokenizer import tokenizer_from_gguf
from tokenspeed.gateway.text.template import ChatTemplate
from tokenspeed.gateway.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tokenspeed.gateway.text.vocabulary import byte_characters

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three \t tab\n\n\nlines\r\n end ",
    "1234567890 3.14159 0x1F",
    "안녕하세요 세계! 你好，世界。 こんにちは",
    "🙂👍🏽👨‍👩‍👧‍👦 é é naïve",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start |> not special <|endoftext|> special",
    "I'll we're don't CAN'T it's",
    "\u00a0\u2003\u200b\ufeff odd spaces",
    "a" * 300,
]


@functools.cache
def embedded() -> Tokenizer:
    return load_tokenizer(embedded_path())


def embedded_path() -> Path:
    return resolve_model(os.environ.get("TOKENSPEED_EMBEDDED_MODEL")).path


@functools.cache
def reference() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(embedded_path().parent), gguf_file=embedded_path().name)


@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_model_encodes_as_transformers_does(text: str) -> None:
    ids = embedded().encode(text, add_special_tokens=False)
    assert ids == reference()(text, add_special_tokens=False)["input_ids"]
    assert embedded().decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(max_size=40))
def test_any_text_survives_the_way_there_and_back_at_every_cut(text: str) -> None:
    # This vocabulary lacks tokens for some bytes (control characters, those that begin characters from U+40000 on);
    # texts with them lose them, here as in transformers.
    tokenizer = embedded()
    text = "".join(c for c in text if all(tokenizer.token_id(_CHARACTERS[b]) is not None for b in c.encode()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    for cut in range(len(ids) + 1):
        machine = Detokenizer(tokenizer.vocabulary, hidden=frozenset(), continues=True)
        assert machine.feed(ids[:cut]) + machine.feed(ids[cut:]) + machine.close() == text


def test_special_tokens_are_left_out_of_the_text_as_transformers_does() -> None:
    ids = embedded().encode("<|im_start|>assistant\nParis.<|im_end|>", add_special_tokens=False)
    assert embedded().decode(ids, skip_special_tokens=True) == reference().decode(ids, skip_special_tokens=True)


def test_the_models_facts_come_from_its_file() -> None:
    tokenizer = embedded()
    assert (tokenizer.size, tokenizer.bos_token, tokenizer.eos_token) == (49152, "<|im_start|>", "<|im_end|>")
    assert tokenizer.encode("x", add_special_tokens=True) == tokenizer.encode("x", add_special_tokens=False)


def test_the_models_chat_template_renders_as_transformers_renders_it() -> None:
    source = embedded().facts.chat_template
    assert source is not None
    template = ChatTemplate(source, {})
    for messages in (
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi \n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "안녕"}],
    ):
        for add_prompt in (False, True):
            ours = template.render(messages, add_generation_prompt=add_prompt)
            theirs = reference().apply_chat_template(messages, tokenize=False, add_generation_prompt=add_prompt)
            assert ours == theirs


# ---- small vocabularies made here ----------------------------------------------------------------------------------

_CHARACTERS = {byte: character for character, byte in byte_characters().items()}


def byte_level_metadata(pre: str) -> dict[str, Any]:
    tokens = [_CHARACTERS[byte] for byte in range(256)] + ["12", "123", "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3],
        "tokenizer.ggml.merges": ["1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 258,
    }


@pytest.mark.parametrize(("pre", "num_tokens"), [("smollm", 4), ("gpt-2", 2), ("llama-bpe", 2), ("qwen2", 4)])
def test_digits_are_split_as_the_pre_tokenizer_says(pre: str, num_tokens: int) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre), "x.gguf")
    ids = tokenizer.encode("1234", add_special_tokens=False)
    assert len(ids) == num_tokens
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1234"


def test_llama_bpe_begins_every_text_with_the_first_token_unless_the_file_says_otherwise() -> None:
    metadata = byte_level_metadata("llama-bpe")
    assert tokenizer_from_gguf(metadata, "x").encode("a", add_special_tokens=True) == [258, ord("a")]
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert tokenizer_from_gguf(metadata, "x").encode("a", add_special_tokens=True) == [ord("a")]


SPM_PIECES = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
SPM_WORDS = {
    "\u2581": -1.0,
    "H": -9.0,
    "i": -9.0,
    "t": -9.0,
    "Hi": -3.0,
    "\u2581Hi": -2.0,
    "it": -1.5,
    "\u2581it": -4.0,
}


def spm_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*SPM_PIECES, *SPM_WORDS],
        "tokenizer.ggml.scores": [0.0] * len(SPM_PIECES) + list(SPM_WORDS.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_merges_by_score_falls_back_to_bytes_and_comes_back() -> None:
    tokenizer = tokenizer_from_gguf(spm_metadata(), "x.gguf")
    ids = tokenizer.encode("Hi it é", add_special_tokens=True)
    pieces = [tokenizer.token_text(token) for token in ids]
    assert pieces == ["<s>", " Hi", " it", " ", "\ufffd", "\ufffd"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hi it é"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "brand-new"}, "brand-new"),
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(byte_level_metadata("gpt-2") | change, "x.gguf")


# ---- tokenizer.json ------------------------------------------------------------------------------------------------


def write_folder(folder: Path, decoder: Any = None) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: b for b, c in _CHARACTERS.items()}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<eos>"}, "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": [256, 7], "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def test_a_folder_with_tokenizer_json_is_loaded_with_its_configuration(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("héllo<eos>", add_special_tokens=False)
    assert ids[-1] == 256
    assert tokenizer.decode(ids, skip_special_tokens=True) == "héllo"
    assert tokenizer.facts.eos_ids == {256, 7}
    assert tokenizer.facts.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer.facts.sampling_defaults == {"temperature": 0.6}
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert load_tokenizer(tmp_path).facts.chat_template == "from its own file"


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    write_folder(tmp_path, tokenizers.decoders.WordPiece())
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="not JSON"):
        load_tokenizer(tmp_path)
