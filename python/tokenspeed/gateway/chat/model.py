# SPDX-License-Identifier: MIT
"""The served model as requests see it: names, tokenizer, chat template, limits.

Made once at start; the limits come from the engine's registration and are read per request. Encoding a long text
happens in a thread (the library releases the interpreter), so that streams of others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tokenspeed.gateway.chat.sampling import CheckedSampling
from tokenspeed.gateway.http.errors import ApiError, invalid
from tokenspeed.gateway.route.router import Router
from tokenspeed.gateway.text.fill import fill_form
from tokenspeed.gateway.text.parse.names import MARKER_TOKENS, Parsers
from tokenspeed.gateway.text.template import ChatTemplate
from tokenspeed.gateway.text.tokenizer import Tokenizer
from tokenspeed.gateway.text.tokenizer_cache import TokenizerCache

_LONG_TEXT = 16_384
"""Characters or tokens from which on a text is encoded or decoded off the loop (about 10 ms)."""
_SMALLEST_WINDOW = 65_536
"""Characters."""


class ServedModel:
    """`names` are all names that requests may use; the first is the one in answers when the engine tells none."""

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        parsers: Parsers,
        router: Router,
        cache: TokenizerCache | None = None,
    ) -> None:
        self.parsers = parsers
        self.template_has_tools = template is not None and template.tools
        self.reply_parsers = parsers if self.template_has_tools else parsers.or_tools("qwen")
        """A template that knows no tools is told of them in words, and so of one way to call them."""
        self.marker_ids = frozenset(
            token_id for marker in MARKER_TOKENS if (token_id := tokenizer.token_id(marker)) is not None
        )
        """Tokens that parsers look for; those that the tokenizer calls special stay in the text for them."""
        self.tokenizer = tokenizer
        self.sampling = CheckedSampling(tokenizer)
        self.cache = cache
        self.fill = fill_form(tokenizer.token_id)
        """How a gap in a text is filled; None where the model cannot."""
        self._encode = tokenizer.encode if cache is None else cache.encode
        self.template = template
        self.keep_reasoning = False
        """Whether prompts keep the reasoning of earlier turns, unless a request says otherwise."""
        self._names = names
        self._router = router

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self._router.model or self._names[0]

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together. Raises `ApiError` 503 without an engine."""
        return self._router.facts().max_model_len

    def check_name(self, asked: str | None) -> None:
        """Raise `ApiError` 404 for a model that is not served here, 503 while nobody can know. Not naming one means
        this one."""
        if asked is None or asked in self._names or asked == self.name:
            return
        if self._router.model is None:
            self._router.facts()  # no engine has told its model's name yet: 503, and worth another try
        raise ApiError(404, "model_not_found", f"model {asked!r} is not served here; {self.name!r} is", "model")

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises `ApiError` 400 for text that is no Unicode (lone surrogates), and for one that
        is too long by far, of which only the beginning is encoded; the exact limit is `check_room`'s."""
        limit = self.max_model_len
        window = max(_SMALLEST_WINDOW, 4 * limit)
        while window < len(text):
            # A cut changes the tokens near it only, so twice the limit leaves no doubt.
            num_tokens = len(await self.tokens(text[:window], param, add_special_tokens=add_special_tokens))
            if num_tokens > 2 * limit:
                message = f"the context is {limit} tokens; the prompt has more than {num_tokens - limit}"
                raise invalid(param, "context_length_exceeded", message)
            window *= 4
        return await self.tokens(text, param, add_special_tokens=add_special_tokens)

    async def tokens(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text of any length. Raises `ApiError` 400 for text that is no Unicode."""
        try:
            if len(text) < _LONG_TEXT:
                return self._encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(self._encode, text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise invalid(param, "invalid_value", f"{param} contains characters that are no Unicode text") from None

    async def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens."""
        if len(token_ids) < _LONG_TEXT:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
