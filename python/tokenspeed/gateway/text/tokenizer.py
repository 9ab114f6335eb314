# SPDX-License-Identifier: MIT
"""The tokenizer of a model: text to ids, ids to text, and what the model's files say about special tokens.

`load_tokenizer` reads a GGUF file or a folder with `tokenizer.json` (through the `tokenizers` library, without
`transformers`). A `Tokenizer` is immutable and shared by all requests; each choice decodes with its own
`Detokenizer`. Offline generation and the gateway use the same object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers

from tokenspeed.gateway.text.detokenizer import Detokenizer
from tokenspeed.gateway.text.vocabulary import TokenSpelling, Vocabulary

# A text is encoded in the caller's thread; handing a batch of one to a pool would only cost its wake-up.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded; one line that names the file and the part that is not understood."""


@dataclass(frozen=True)
class TokenizerFacts:
    """What a model's files say beside the vocabulary."""

    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    """Control tokens: not shown when special tokens are skipped."""
    added_ids: frozenset[int]
    """Tokens matched in the text before any splitting; the special ones are among them."""
    prefix_ids: tuple[int, ...]
    """Put before every text that is encoded with special tokens, where the library does not do it."""
    suffix_ids: tuple[int, ...]
    chat_template: str | None
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """`temperature`, `top_p`, `top_k`, `repetition_penalty`, `min_p` as the model's authors recommend them."""


@dataclass(frozen=True)
class SpecialToken:
    """A token that is found in the text as it was written, before anything else is done to it."""

    text: str
    isolated: bool
    """It is found wherever it stands, and takes no white space beside it."""


class Tokenizer:
    """Encodes and decodes. `size` is the number of token ids; a model may have more logits than that."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: TokenSpelling, facts: TokenizerFacts) -> None:
        self.facts = facts
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        self.vocabulary = Vocabulary(self.size, backend.id_to_token, spelling, facts.added_ids, facts.special_ids)
        self._backend = backend

    def prefer(self, sampling: Mapping[str, float]) -> None:
        """Let these defaults stand before those that the model's files recommend."""
        self.facts = replace(self.facts, sampling_defaults={**self.facts.sampling_defaults, **sampling})

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a sequence."""
        return None if self.facts.bos_id is None else self.token_text(self.facts.bos_id)

    @property
    def eos_token(self) -> str | None:
        """The text of a token that ends a sequence."""
        return self.token_text(min(self.facts.eos_ids)) if self.facts.eos_ids else None

    @property
    def special_tokens(self) -> list[SpecialToken]:
        """Those that are found in the text itself. A token that is found in the normalized text is none."""
        return [
            SpecialToken(token.content, not (token.lstrip or token.rstrip or token.single_word))
            for token in self._backend.get_added_tokens_decoder().values()
            if not token.normalized
        ]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Special tokens written out in the text are recognised; with `add_special_tokens`, those
        that the model expects around every text (such as the first one) are added."""
        # "Fast" leaves out the offsets of tokens in the text, which nobody asks for.
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        if add_special_tokens and (self.facts.prefix_ids or self.facts.suffix_ids):
            return [*self.facts.prefix_ids, *ids, *self.facts.suffix_ids]
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence, by the same machine that streams it."""
        hidden = self.hidden(skip_special_tokens, frozenset())
        detokenizer = Detokenizer(self.vocabulary, hidden=hidden, continues=False)
        return detokenizer.feed(token_ids) + detokenizer.close()

    def hidden(self, skip_special_tokens: bool, kept: frozenset[int]) -> frozenset[int]:
        """The tokens that a text does not show; `kept` are special ones that it shows all the same."""
        return self.facts.special_ids - kept if skip_special_tokens else frozenset()

    def token_text(self, token_id: int) -> str:
        """One token alone; bytes that are no whole character show as U+FFFD."""
        return self.vocabulary.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text."""
        return self.vocabulary.token_bytes(token_id)

    def to_json(self) -> str:
        """What a `tokenizer.json` of it says."""
        return self._backend.to_str()

    def token_id(self, piece: str) -> int | None:
        """The id of a vocabulary entry, None when there is none."""
        return self._backend.token_to_id(piece)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a `.gguf` file, or of a folder (or file) with `tokenizer.json`. Raises `TokenizerError`."""
    if path.is_dir():
        gguf_files = sorted(path.glob("*.gguf"))
        if not (path / "tokenizer.json").exists() and len(gguf_files) == 1:
            path = gguf_files[0]
    if path.suffix == ".gguf":
        # Loaded when needed: a server of a folder never parses GGUF.
        from tokenspeed.config.gguf import read_gguf
        from tokenspeed.gateway.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(read_gguf(path).metadata, str(path))
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise TokenizerError(f"{folder}: no tokenizer.json (a slow tokenizer alone is not supported)")
    return tokenizer_from_json(file)


def tokenizer_from_json(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` and the configuration files beside it. Raises `TokenizerError`."""
    text = file.read_text(encoding="utf-8")
    definition = _json_object(file, text)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for any fault of the file
        raise TokenizerError(f"{file}: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    config = _optional_json(file.with_name("tokenizer_config.json"))
    generation = _optional_json(file.with_name("generation_config.json"))
    added = definition.get("added_tokens") or []
    bos = _token_of(config.get("bos_token"))
    facts = TokenizerFacts(
        bos_id=None if bos is None else backend.token_to_id(bos),
        eos_ids=_eos_ids(config, generation, backend),
        special_ids=frozenset(token["id"] for token in added if token.get("special")),
        added_ids=frozenset(token["id"] for token in added),
        prefix_ids=(),
        suffix_ids=(),
        chat_template=_chat_template(file.parent, config),
        sampling_defaults=_sampling_defaults(generation),
    )
    return Tokenizer(backend, _spelling_of(definition.get("decoder"), file), facts)


def _spelling_of(decoder: dict[str, Any] | None, file: Path) -> TokenSpelling:
    kinds = [step["type"] for step in _steps(decoder)]
    if kinds == ["ByteLevel"]:
        return TokenSpelling.BYTE_LEVEL
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return TokenSpelling.SENTENCEPIECE
    raise TokenizerError(f"{file}: decoder {'+'.join(kinds) or 'none'} is not supported (byte-level or SentencePiece)")


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _token_of(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(config: dict[str, Any], generation: dict[str, Any], backend: tokenizers.Tokenizer) -> frozenset[int]:
    ids: set[int] = set()
    eos = _token_of(config.get("eos_token"))
    if eos is not None and (token_id := backend.token_to_id(eos)) is not None:
        ids.add(token_id)
    declared = generation.get("eos_token_id")
    if isinstance(declared, int):
        ids.add(declared)
    elif isinstance(declared, list):
        ids.update(token_id for token_id in declared if isinstance(token_id, int))
    return frozenset(ids)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    for name in ("chat_template.jinja", "chat_template.json"):
        file = folder / name
        if file.exists():
            text = file.read_text(encoding="utf-8")
            return text if file.suffix == ".jinja" else _json_object(file, text).get("chat_template")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    if generation.get("do_sample") is False:
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: generation[name] for name in names if isinstance(generation.get(name), (int, float))}


def _optional_json(file: Path) -> dict[str, Any]:
    return _json_object(file, file.read_text(encoding="utf-8")) if file.exists() else {}


def _json_object(file: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: expected a JSON object")
    return value
