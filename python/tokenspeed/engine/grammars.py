# SPDX-License-Identifier: MIT
"""The engine's grammar compiler: which tokens the model has, and the library that the flags name.

Called once by `core`. Nothing is read or imported here: the compiler's first thread loads the tokenizer and the library
while the weights load, so that an engine whose requests are not constrained waits for neither.
"""

from __future__ import annotations

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_source import ModelSource, resolve_model
from tokenspeed.config.resolve import Config
from tokenspeed.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tokenspeed.grammar import Backend, GrammarCompiler, TokenTable, load_backend


def grammar_compiler(config: Config, source: ModelSource, model: ModelConfig) -> GrammarCompiler:
    """A compiler that has begun to load its library, unless the flags switch it off."""

    def make_backend() -> Backend:
        named = resolve_model(config.loader.tokenizer) if config.loader.tokenizer else source
        table = token_table(load_tokenizer(named.path), model.vocab_size, model.eos_token_ids)
        return load_backend(config.grammar.backend, table, config.grammar.any_whitespace)

    compiler = GrammarCompiler(config.grammar, make_backend)
    if config.grammar.backend != "none" and not config.offline.skip_tokenizer_init:
        compiler.load()
    return compiler


def token_table(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> TokenTable:
    """The bytes of every token that the model has logits for."""
    facts = tokenizer.facts
    tokens = [b"" if token in facts.special_ids else tokenizer.token_bytes(token) for token in range(vocab_size)]
    special = {tokenizer.token_text(token): token for token in sorted(facts.special_ids)}
    return TokenTable(tokens, special, eos_token_ids or tuple(sorted(facts.eos_ids)))
