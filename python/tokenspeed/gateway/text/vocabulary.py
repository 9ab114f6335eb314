# SPDX-License-Identifier: MIT
"""The bytes of every token: what turns ids back into text.

Two kinds of vocabulary exist. Byte-level ones (GPT-2 and its heirs) spell each byte as a printable character.
SentencePiece ones spell a space as U+2581 and have `<0xNN>` tokens for bytes that have no other token. Both give
bytes here, so that everything after it is plain incremental UTF-8. Entries are computed when first asked for: a
vocabulary has 50,000 to 250,000 entries and a reply uses a few hundred.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class TokenSpelling(enum.Enum):
    """How a vocabulary spells bytes."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"


def byte_characters() -> dict[str, int]:
    """The printable character of each byte in a byte-level vocabulary, as GPT-2 numbered them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = byte_characters()


class Vocabulary:
    """Bytes by token id. `added` are the tokens that stand outside the byte spelling; `special` are never shown."""

    def __init__(
        self,
        size: int,
        piece_of: Callable[[int], str | None],
        spelling: TokenSpelling,
        added: frozenset[int],
        special: frozenset[int],
    ) -> None:
        self.size = size
        self.spelling = spelling
        self.special = special
        self._piece_of = piece_of
        self._added = added
        self._bytes: list[bytes | None] = [None] * size

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text. Ids outside the vocabulary (padding rows of the model) add none."""
        if not 0 <= token_id < self.size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        piece = self._piece_of(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self.spelling is TokenSpelling.SENTENCEPIECE:
            byte = _BYTE_TOKEN.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE_MARK, " ").encode()
        try:
            return bytes([_BYTES[character] for character in piece])
        except KeyError:
            return piece.encode()
