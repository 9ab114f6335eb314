# SPDX-License-Identifier: MIT
"""The tokenizer that a GGUF file carries in its metadata, rebuilt for the `tokenizers` library.

`tokenizer.ggml.model` is `gpt2` (byte-level BPE with merges; `tokenizer.ggml.pre` names how text is split first) or
`llama` (SentencePiece BPE: scores instead of merges, a space before the first word, bytes as `<0xNN>`). What is not
known is refused by name: a wrong split gives wrong tokens without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tokenspeed.gateway.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts
from tokenspeed.gateway.text.vocabulary import TokenSpelling

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "llama3": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _split(_QWEN2_SPLIT),
}
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3"})
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3"})


def tokenizer_from_gguf(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """The tokenizer in GGUF `metadata`; `name` is the file, for messages. Raises `TokenizerError`."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError(f"{name}: no tokenizer in this GGUF file (tokenizer.ggml.tokens is missing)")
    if model == "gpt2":
        backend = _byte_level_bpe(metadata, tokens, name)
        spelling = TokenSpelling.BYTE_LEVEL
    elif model == "llama":
        backend = _sentencepiece_bpe(metadata, tokens, name)
        spelling = TokenSpelling.SENTENCEPIECE
    else:
        raise TokenizerError(f"{name}: tokenizer.ggml.model {model!r} is not supported (gpt2, llama)")
    types = _types(metadata, tokens)
    control = [i for i, kind in enumerate(types) if kind == _CONTROL]
    defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
    # normalized=False: these are matched in the text as it was written.
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in defined])
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in control])
    return Tokenizer(backend, spelling, _facts(metadata, control, defined))


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise TokenizerError(f"{name}: tokenizer.ggml.pre {pre!r} is not supported ({known})")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _IGNORE_MERGES)
    backend = tokenizers.Tokenizer(bpe)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise TokenizerError(f"{name}: tokenizer.ggml.scores must have one score a token")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    bpe = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(vocabulary, scores, _types(metadata, tokens)),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(bpe)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the best score; as a list of merges, that is every way to cut a
    token in two, tokens by falling score."""
    found: list[tuple[float, int, str, str]] = []
    for token, token_id in vocabulary.items():
        if types[token_id] in (_CONTROL, _UNKNOWN, _USER_DEFINED) or len(token) < 2:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-float(scores[token_id]), len(found), left, right))
    found.sort()
    return [(left, right) for _, _, left, right in found]


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Sequence[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    return [1] * len(tokens) if types is None else [int(kind) for kind in types]


def _facts(metadata: Mapping[str, Any], control: list[int], defined: list[int]) -> TokenizerFacts:
    def token(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if value is None else int(value)

    bos, eos = token("bos"), token("eos")
    is_spm = metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = is_spm or metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    ends = (eos, token("eot"), token("eom"))
    return TokenizerFacts(
        bos_id=bos,
        eos_ids=frozenset(end for end in ends if end is not None),
        special_ids=frozenset(control),
        added_ids=frozenset(control) | frozenset(defined),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if metadata.get("tokenizer.ggml.add_eos_token") and eos is not None else (),
        chat_template=metadata.get("tokenizer.chat_template"),
    )
