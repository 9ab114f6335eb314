# SPDX-License-Identifier: MIT
"""A model's tokenizer as files that other programs read, and as one archive that is sent to them.

A folder's own files are taken as they are. What a GGUF file carries in its metadata is written out in the same form:
`tokenizer.json`, `tokenizer_config.json`, and as much of `config.json` and `generation_config.json` as readers of
tokenizers look at. The archive's bytes depend on the files alone.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.gateway.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer

_NAMES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
_SUFFIXES = (".jinja", ".model", ".tiktoken")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """By name, sorted. `path`: a folder with a tokenizer, a file in one, or a GGUF file. Raises TokenizerError."""
    if path.is_dir() and not (path / "tokenizer.json").exists() and len(found := sorted(path.glob("*.gguf"))) == 1:
        path = found[0]
    if path.suffix == ".gguf":
        return _of_gguf(path)
    folder = path if path.is_dir() else path.parent
    names = sorted(
        file.name for file in folder.iterdir() if file.is_file() and (file.name in _NAMES or file.suffix in _SUFFIXES)
    )
    if not names:
        raise TokenizerError(f"{folder}: no files of a tokenizer")
    return {name: (folder / name).read_bytes() for name in names}


def tokenizer_archive(files: Mapping[str, bytes]) -> bytes:
    """A zip of the files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED, 6)
    return buffer.getvalue()


def _of_gguf(path: Path) -> dict[str, bytes]:
    # Loaded when needed: a server of a folder never parses GGUF.
    from tokenspeed.config.gguf import read_gguf

    metadata = read_gguf(path).metadata
    tokenizer = load_tokenizer(path)
    files = {
        "config.json": _config(metadata, tokenizer),
        "generation_config.json": _ends(tokenizer),
        "tokenizer_config.json": _tokenizer_config(metadata, tokenizer),
    }
    written = {name: json.dumps(content, sort_keys=True, ensure_ascii=False) for name, content in files.items()}
    written["tokenizer.json"] = tokenizer.to_json()
    return {name: text.encode() for name, text in sorted(written.items())}


def _ends(tokenizer: Tokenizer) -> dict[str, Any]:
    facts = tokenizer.facts
    ends = sorted(facts.eos_ids)
    known = {"bos_token_id": facts.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return {name: value for name, value in known.items() if value not in (None, [])}


def _config(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    known = {
        "model_type": architecture,
        "vocab_size": tokenizer.size,
        "max_position_embeddings": metadata.get(f"{architecture}.context_length"),
    }
    return {name: value for name, value in known.items() if value is not None} | _ends(tokenizer)


def _tokenizer_config(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    facts = tokenizer.facts
    known = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "add_bos_token": bool(facts.prefix_ids),
        "chat_template": facts.chat_template,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    }
    return {name: value for name, value in known.items() if value is not None}
