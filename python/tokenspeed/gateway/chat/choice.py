# SPDX-License-Identifier: MIT
"""One choice of an answer as a pure machine: token ids in, text, logprobs and an end out.

It joins the detokenizer and the stop matcher and keeps the logprobs in step with the text: an entry is given out with
the first text that reaches its token's characters, and entries of tokens whose text was cut away by a stop string are
not given out at all. So the joined pieces of a stream equal the answer given whole, for every cut of the tokens.
It knows nothing of HTTP, JSON or engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenspeed.gateway.text.detokenizer import Detokenizer
from tokenspeed.gateway.text.parse.events import Event, Text
from tokenspeed.gateway.text.stop import StopMatcher
from tokenspeed.gateway.text.vocabulary import Vocabulary


class TextRules(msgspec.Struct, frozen=True):
    """How the tokens of a request's choices become text."""

    stop: tuple[str, ...]
    include_stop: bool
    """Stop strings and stop tokens stay in the text."""
    hidden: frozenset[int]
    """Tokens that are not shown: special ones, unless they were asked for or a parser looks for them."""
    continues: bool
    """The text goes on after the prompt's (completions), or begins anew (chat)."""
    min_tokens: int
    """Stop strings are not looked for before this many tokens."""
    logprobs: bool


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token with its natural-log probability and the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int
    """Characters of the choice's text before this token."""


class Piece(msgspec.Struct, frozen=True):
    """What some tokens added. `finish` is "" until the choice's end."""

    text: str
    logprobs: Sequence[TokenLogprob]
    finish: str
    matched: str | int | None
    """The stop string or token that ended the choice."""
    token_ids: Sequence[int]
    """The tokens that were taken, also those whose text is held back or cut away."""
    events: Sequence[Event]
    """What the text means, in place of `text`, where a parser reads it (`chat.reply`)."""
    weight_version: str | None = None
    """The name of the weights that served, where the engine tells it."""

    @property
    def meaning(self) -> Sequence[Event]:
        """The events; text that no parser reads is content."""
        return self.events or ([Text(self.text)] if self.text else ())


class Tokens(msgspec.Struct, frozen=True):
    """New tokens of a choice with whatever came beside them; `finish` is "" or the engine's reason."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]
    finish: str
    matched: int | None
    weight_version: str | None = None


_NO_STOPS = StopMatcher(())  # lets everything through, and so has no state: one for all


class Choice:
    """The machine. After a piece with a `finish`, nothing more is taken."""

    def __init__(self, vocabulary: Vocabulary, rules: TextRules) -> None:
        self.num_tokens = 0
        """Tokens that were taken, the one that ended the choice included."""
        self.finish = ""
        self._logprob_sum = 0.0
        self._num_logprobs = 0
        self._rules = rules
        self._detokenizer = Detokenizer(vocabulary, hidden=rules.hidden, continues=rules.continues)
        self._matcher = StopMatcher(rules.stop) if rules.stop else _NO_STOPS
        self._by_token = bool(rules.stop) or rules.logprobs
        self._num_decoded = 0
        self._num_emitted = 0
        self._pending: list[TokenLogprob] = []

    @property
    def mean_logprob(self) -> float:
        """Per token with a logprob; 0 without any."""
        return self._logprob_sum / self._num_logprobs if self._num_logprobs else 0.0

    def feed(self, tokens: Tokens) -> Piece:
        """Take new tokens; the piece may be empty while text is held back."""
        ids = tokens.ids
        shown = ids[:-1] if tokens.finish == "stop" and ids and not self._rules.include_stop else ids
        if not self._by_token:
            self.num_tokens += len(ids)
            return self._end(tokens, self._detokenizer.feed(shown), None, ids)
        text = ""
        for i, token_id in enumerate(shown):
            self.num_tokens += 1
            self._note_logprob(tokens, i, token_id)
            decoded = self._detokenizer.feed((token_id,))
            self._num_decoded += len(decoded)
            emitted, matched = self._match(decoded)
            text += emitted
            if matched is not None:
                return self._end(tokens, text, matched, ids[: i + 1])
        self.num_tokens += len(ids) - len(shown)
        return self._end(tokens, text, None, ids)

    def _match(self, decoded: str) -> tuple[str, str | None]:
        if self.num_tokens <= self._rules.min_tokens:
            # The text so far can never be part of a stop string: the minimum was asked for.
            return decoded, None
        emitted, matched = self._matcher.feed(decoded)
        return (emitted + matched, matched) if matched is not None and self._rules.include_stop else (emitted, matched)

    def _end(self, tokens: Tokens, text: str, matched: str | None, taken: Sequence[int]) -> Piece:
        """Finish the piece: close the machines at the end, release logprobs that the text has reached."""
        if matched is None and tokens.finish:
            rest, matched = self._match(self._detokenizer.close())
            text += rest
            if matched is None:
                text += self._matcher.close()
        self.finish = "stop" if matched is not None else tokens.finish
        self._num_emitted += len(text)
        if not self._by_token:
            return Piece(text, (), self.finish, tokens.matched, taken, (), tokens.weight_version)
        ended_by = matched if matched is not None else tokens.matched
        return Piece(text, self._released(matched), self.finish, ended_by, taken, (), tokens.weight_version)

    def _note_logprob(self, tokens: Tokens, i: int, token_id: int) -> None:
        if not self._rules.logprobs or i >= len(tokens.logprobs):
            return
        top: tuple[tuple[int, float], ...] = ()
        if i < len(tokens.top_ids):
            top = tuple(zip(tokens.top_ids[i], tokens.top_logprobs[i]))
        self._logprob_sum += tokens.logprobs[i]
        self._num_logprobs += 1
        self._pending.append(TokenLogprob(token_id, tokens.logprobs[i], top, self._num_decoded))

    def _released(self, matched: str | None) -> list[TokenLogprob]:
        pending = self._pending
        if not pending:
            return []
        if self.finish and matched is None:
            self._pending = []
            return pending
        released = [entry for entry in pending if entry.offset < self._num_emitted]
        self._pending = pending[len(released) :]
        return released
