# SPDX-License-Identifier: MIT
"""Words that must not be written, as the token sequences that would write them.

A word may stand at the start of a text or after a space, and tokenizers cut the two differently; both are barred. Other
ways to spell a word from odd tokens remain possible: it is the words' usual spellings that are barred, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.gateway.text.tokenizer import Tokenizer


def bad_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The sequences of all words, each once."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            sequence = tuple(tokenizer.encode(text, add_special_tokens=False))
            if sequence:
                found[sequence] = None
    return tuple(found)
