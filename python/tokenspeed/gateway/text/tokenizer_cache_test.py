# SPDX-License-Identifier: MIT
"""The tokens are the same with and without the cache, for tokenizers of every kind; and the cache is bounded."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tokenspeed.config.model_source import resolve_model
from tokenspeed.gateway.text.tokenizer import Tokenizer, TokenizerFacts, load_tokenizer
from tokenspeed.gateway.text.tokenizer_cache import CacheSizes, TokenizerCache
from tokenspeed.gateway.text.vocabulary import TokenSpelling

BOTH = CacheSizes(100, 1 << 20, 1 << 20)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "<|im", "<tool>", "<mask>", "<word>", "<left>", "<norm>"]
_FACTS = TokenizerFacts(None, frozenset(), frozenset(), frozenset(), (), (), None)


def _tokenizer(backend: tokenizers.Tokenizer, spelling: TokenSpelling) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS[:5]])
    backend.add_special_tokens([AddedToken("<mask>", normalized=False, rstrip=True)])
    backend.add_special_tokens([AddedToken("<left>", normalized=False, lstrip=True)])
    backend.add_tokens([AddedToken("<word>", normalized=False, single_word=True), AddedToken("<norm>")])
    return Tokenizer(backend, spelling, _FACTS)


def _trained(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    draw = random.Random(0)
    words = ["a", "b", "ab", "aba", "hello", "world", "안녕", "1", "12", ".", "\n", "  "]
    texts = [" ".join(draw.choices(words, k=20)) for _ in range(300)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    return backend


def byte_level(prefix_space: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    return _tokenizer(_trained(backend), TokenSpelling.BYTE_LEVEL)


def metaspace(scheme: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="?", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return _tokenizer(_trained(backend), TokenSpelling.SENTENCEPIECE)


def sentencepiece() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _tokenizer(_trained(backend), TokenSpelling.SENTENCEPIECE)


def composing() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _tokenizer(_trained(backend), TokenSpelling.BYTE_LEVEL)


def embedded() -> Tokenizer:
    return load_tokenizer(resolve_model(os.environ.get("TOKENSPEED_EMBEDDED_MODEL")).path)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "embedded": embedded,
    "byte level": lambda: byte_level(False),
    "byte level with a space": lambda: byte_level(True),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "sentencepiece": sentencepiece,
    "composing and stripping": composing,
}


@functools.cache
def made(kind: str) -> Tokenizer:
    return KINDS[kind]()


def nobody(cache: str, hit: bool, num_reused: int) -> None:
    """Told of looks, and content."""


PARTS = st.one_of(
    st.sampled_from([*SPECIALS, "<|endoftext|>", "<|im_start", "|>", " ", "\n", "e", "\u0301", "한", "hello", "ab"]),
    st.text(max_size=4),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(st.lists(PARTS, max_size=8).map("".join), min_size=1, max_size=4), special=st.booleans())
@example(texts=["<|im<word>"], special=False)  # a word of its own only where no letter stands before it
def test_the_tokens_are_the_same_with_and_without(kind: str, texts: list[str], special: bool) -> None:
    tokenizer = made(kind)
    cache = TokenizerCache(tokenizer, BOTH, nobody)
    grown = ""
    for text in texts:
        grown += text
        for asked in (text, grown, grown):
            expected = tokenizer.encode(asked, add_special_tokens=special)
            assert cache.encode(asked, add_special_tokens=special) == expected


def seen_by(tokenizer: Tokenizer, sizes: CacheSizes) -> tuple[TokenizerCache, list[tuple[str, bool, int]]]:
    looks: list[tuple[str, bool, int]] = []
    return TokenizerCache(tokenizer, sizes, lambda *look: looks.append(look)), looks


def test_a_next_turn_encodes_only_what_is_new() -> None:
    cache, looks = seen_by(embedded(), CacheSizes(0, 0, 1 << 20))
    turn = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    cache.encode(turn, add_special_tokens=False)
    looks.clear()
    longer = turn + "Hi.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    assert cache.encode(longer, add_special_tokens=False) == embedded().encode(longer, add_special_tokens=False)
    missed = sum(not hit for _, hit, _ in looks)
    assert missed <= 4 and sum(reused for _, _, reused in looks) > len(turn) // 2


def test_a_text_is_cut_only_where_the_tokenizer_cuts_it() -> None:
    def cuts(kind: str) -> int:
        cache, looks = seen_by(made(kind), CacheSizes(0, 0, 1 << 20))
        cache.encode("<s>a<tool>b<mask> c<left>d<word> e<norm>f", add_special_tokens=False)
        return len(looks)

    assert cuts("byte level") == 3
    assert cuts("metaspace first") == 1
    assert cuts("metaspace never") == 3


@pytest.mark.parametrize("sizes", [CacheSizes(5, 1 << 20, 0), CacheSizes(1000, 4000, 0), CacheSizes(0, 0, 4000)])
def test_memory_is_bounded_and_the_longest_unused_go_first(sizes: CacheSizes) -> None:
    tokenizer = made("byte level")
    cache, looks = seen_by(tokenizer, sizes)
    for number in range(50):
        cache.encode(f"hello {number}", add_special_tokens=False)
        cache.encode("hello 0", add_special_tokens=False)
    assert sum(cache.num_evicted.values()) >= 30
    assert sum(hit for _, hit, _ in looks) == 50
    big = "ab " * 2000  # would push out everything
    looks.clear()
    assert cache.encode(big, add_special_tokens=False) == tokenizer.encode(big, add_special_tokens=False)
    cache.encode("hello 0", add_special_tokens=False)
    assert looks[-1][1] or sizes.exact_bytes == 1 << 20
