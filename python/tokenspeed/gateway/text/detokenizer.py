# SPDX-License-Identifier: MIT
"""Token ids to text as a pure machine: the same text out, whatever the cuts of the ids in.

Text is given out as soon as its characters are whole. Bytes that are no UTF-8 become U+FFFD, by the Unicode
standard's rule for maximal subparts, when they are refuted or at `close`. One `Detokenizer` a choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tokenspeed.gateway.text.vocabulary import TokenSpelling, Vocabulary

_new_decoder: type[codecs.BufferedIncrementalDecoder] = codecs.getincrementaldecoder("utf-8")  # type: ignore[assignment]


class Detokenizer:
    """Decodes the tokens of one choice, but for the `hidden` ones.

    `continues`: the text goes on after a prompt, so a first space belongs to it; else the space that SentencePiece
    puts before the first word of a text is taken away.
    """

    def __init__(self, vocabulary: Vocabulary, *, hidden: frozenset[int], continues: bool) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._skip = hidden
        self._decoder: codecs.BufferedIncrementalDecoder | None = None
        """Made at the first byte that is no ASCII, which many texts never have."""
        self._strip = not continues and vocabulary.spelling is TokenSpelling.SENTENCEPIECE

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that has become whole with `token_ids`."""
        skip, token_bytes = self._skip, self._token_bytes
        data = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skip])
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        if data.isascii() and (self._decoder is None or not self._decoder.buffer):
            return data.decode("ascii")  # most tokens: the incremental decoder runs in Python
        if self._decoder is None:
            self._decoder = _new_decoder(errors="replace")
        return self._decoder.decode(data)

    def close(self) -> str:
        """What is left: U+FFFD for an unfinished character, else nothing."""
        return "" if self._decoder is None else self._decoder.decode(b"", True)
