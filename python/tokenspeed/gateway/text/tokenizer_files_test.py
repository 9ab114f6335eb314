# SPDX-License-Identifier: MIT
"""A tokenizer as files: what a GGUF file carries survives the way through them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from tokenspeed.config.model_source import embedded_model_path
from tokenspeed.gateway.text.tokenizer import TokenizerError, load_tokenizer
from tokenspeed.gateway.text.tokenizer_files import tokenizer_archive, tokenizer_files

TEXT = "<|im_start|>user\n수도는 12 é?<|im_end|>\n"


def test_a_gguf_files_tokenizer_is_the_same_from_its_archive(tmp_path: Path) -> None:
    path = embedded_model_path()
    archive = tokenizer_archive(tokenizer_files(path))
    assert archive == tokenizer_archive(tokenizer_files(path))
    zipfile.ZipFile(io.BytesIO(archive)).extractall(tmp_path)
    own, copied = load_tokenizer(path), load_tokenizer(tmp_path)
    assert copied.encode(TEXT, add_special_tokens=True) == own.encode(TEXT, add_special_tokens=True)
    assert (copied.facts.bos_id, copied.facts.eos_ids) == (own.facts.bos_id, own.facts.eos_ids)
    assert copied.facts.chat_template == own.facts.chat_template


def test_a_folder_gives_its_own_files_and_no_weights(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "chat_template.jinja", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text(name)
    files = tokenizer_files(tmp_path)
    assert list(files) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert tokenizer_files(tmp_path / "tokenizer.json") == files


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        tokenizer_files(tmp_path)
